// Quantization of groups on CUDA, on threads in software: the bytes of the CPU's quantizer for each
// group, and what sizes that can't be give.
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/kernels/grouped.h"
#include "cuda/tests/kernels.h"
#include "te/quantize.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using te::Scaling;

struct GroupedCase {
  std::vector<int32_t> sizes;
  int64_t length, rows_each, cols;
  DType dtype;
  Scaling scaling;
  te::QType qtype;
  bool rowwise, colwise, wide;

  int64_t rows() const { return length * rows_each; }
  int64_t groups() const { return static_cast<int64_t>(sizes.size()); }

  std::string text() const {
    std::string sums;
    for (int32_t size : sizes) sums += std::to_string(size) + " ";
    return sums + "of " + std::to_string(length) + " x " + std::to_string(rows_each) + " x " +
           std::to_string(cols) + ", " + name(dtype) + ", scaling " +
           std::to_string(static_cast<int>(scaling)) + ", qtype " +
           std::to_string(static_cast<int>(qtype)) + (rowwise ? ", by row" : "") +
           (colwise ? ", by column" : "") + (wide ? ", aligned" : "");
  }
};

struct GroupedResults {
  explicit GroupedResults(const GroupedCase& c)
      : qvalues(c.rows() * c.cols, c.wide ? 0 : 1),
        colwise(c.rows() * c.cols, c.wide ? 0 : 3),
        scales(bytes(c, c.rows()), 4),
        colwise_scales(bytes(c, c.groups() * c.cols), 4),
        absmax(4 * c.groups(), 4) {}

  static int64_t bytes(const GroupedCase& c, int64_t slices) {
    if (c.scaling == Scaling::kMx) return c.rows() * c.cols / te::kBlock;
    return 4 * (c.scaling == Scaling::kChannel ? slices : c.groups());
  }

  Buffer qvalues, colwise, scales, colwise_scales, absmax;
};

void run(const GroupedCase& c, const Buffer& x, const Buffer& scale, GroupedResults& found) {
  std::vector<cuda::GroupStart> starts(c.sizes.size() + 1);
  cuda::GroupedQuantize args;
  args.x = x.get();
  args.dtype = te::float_of(c.dtype);
  args.length = c.length;
  args.rows_each = c.rows_each;
  args.cols = c.cols;
  args.sizes = c.sizes.data();
  args.groups = c.groups();
  args.qtype = c.qtype;
  args.scaling = c.scaling;
  args.scale = reinterpret_cast<const float*>(scale.get());
  if (c.rowwise) {
    args.qvalues = found.qvalues.get();
    args.scales = found.scales.get();
  }
  if (c.colwise) {
    args.colwise = found.colwise.get();
    args.colwise_scales = found.colwise_scales.get();
  }
  args.absmax = reinterpret_cast<float*>(found.absmax.get());
  args.starts = starts.data();
  cuda::grouped_quantize(args, nullptr);
}

// As the CPU's handler does it.
void expect(const GroupedCase& c, const Buffer& x, const Buffer& scale, GroupedResults& wanted) {
  const bool tensor = te::is_tensor(c.scaling), mx = c.scaling == Scaling::kMx;
  int64_t row = 0;
  for (int64_t i = 0; i < c.groups(); ++i) {
    const int64_t at = row * c.cols;
    te::Quantize args;
    args.x = x.get() + at * bytes_of(c.dtype);
    args.dtype = te::float_of(c.dtype);
    args.rows = c.sizes[static_cast<size_t>(i)] * c.rows_each;
    args.cols = c.cols;
    args.qtype = c.qtype;
    args.scaling = c.scaling;
    args.wants_absmax = tensor;
    args.qvalues = c.rowwise ? wanted.qvalues.get() + at : nullptr;
    args.colwise = c.colwise ? wanted.colwise.get() + at : nullptr;
    if (tensor) {
      args.scale = static_cast<float>(element(scale.get(), DType::F32, i));
      set_element(wanted.scales.get(), DType::F32, i, 1.0f / args.scale);
      set_element(wanted.colwise_scales.get(), DType::F32, i, 1.0f / args.scale);
    } else {
      args.scales = wanted.scales.get() + (mx ? at / te::kBlock : 4 * row);
      args.colwise_scales = wanted.colwise_scales.get() + (mx ? at / te::kBlock : 4 * i * c.cols);
    }
    set_element(wanted.absmax.get(), DType::F32, i, te::quantize(args, Parallel()));
    row += args.rows;
  }
}

void check_grouped(GroupedCase c, std::mt19937& random) {
  if (!takes_case()) return;
  c.length = std::accumulate(c.sizes.begin(), c.sizes.end(), int64_t{0});
  // Rows that no group has.
  if (random() % 3 == 0) c.length += c.scaling == Scaling::kMx && c.colwise ? 96 : 70;
  const std::string what = c.text();
  Buffer x = numbers(c.rows() * c.cols, c.dtype, c.wide, 3.0f, random);
  if (random() % 4 == 0) spoil(x, c.rows() * c.cols, c.dtype, random);
  Buffer scale(4 * c.groups(), 4);
  for (int64_t i = 0; i < c.groups(); ++i) {
    set_element(scale.get(), DType::F32, i, 1.0f + static_cast<float>(random() % 1000) / 32.0f);
  }
  GroupedResults found(c), wanted(c);
  for (Buffer* one : {&found.qvalues, &found.colwise, &found.scales, &found.colwise_scales}) {
    fill_nan(*one);
  }
  for (Buffer* one : {&wanted.qvalues, &wanted.colwise, &wanted.scales, &wanted.colwise_scales}) {
    std::memset(one->get(), 0, static_cast<size_t>(one->size()));
  }
  run(c, x, scale, found);
  expect(c, x, scale, wanted);
  if (c.rowwise) {
    CHECK_THAT(same(found.qvalues, wanted.qvalues), what + ": quantized values");
    CHECK_THAT(same(found.scales, wanted.scales), what + ": scales");
  }
  if (c.colwise) {
    CHECK_THAT(same(found.colwise, wanted.colwise), what + ": quantized values by column");
    CHECK_THAT(same(found.colwise_scales, wanted.colwise_scales), what + ": scales by column");
  }
  CHECK_THAT(same(found.absmax, wanted.absmax), what + ": largest magnitudes");
}

bool all_ones(const Buffer& buffer) {
  for (int64_t i = 0; i < buffer.size(); ++i) {
    if (buffer.get()[i] != 0xff) return false;
  }
  return true;
}

void check_refused(GroupedCase c, std::mt19937& random) {
  if (!takes_case()) return;
  const std::string what = c.text();
  const Buffer x = numbers(c.rows() * c.cols, c.dtype, c.wide, 3.0f, random);
  const Buffer scale = numbers(c.groups(), DType::F32, true, 1.0f, random);
  GroupedResults found(c);
  run(c, x, scale, found);
  if (c.rowwise) CHECK_THAT(all_ones(found.qvalues) && all_ones(found.scales), what);
  if (c.colwise) CHECK_THAT(all_ones(found.colwise) && all_ones(found.colwise_scales), what);
  CHECK_THAT(all_ones(found.absmax), what);
}

constexpr Scaling kScalings[] = {Scaling::kDelayedTensor, Scaling::kCurrentTensor,
                                 Scaling::kChannel, Scaling::kMx};

TEST(cuda_grouped_quantize) {
  std::mt19937 random(41);
  const std::vector<std::vector<int32_t>> some = {{},        {0},     {1},       {5, 0, 70},
                                                  {64, 128}, {0, 66}, {3, 0, 0}, {1, 2, 3, 65}};
  for (DType dtype : kFloats) {
    for (Scaling scaling : kScalings) {
      for (int layout = 1; layout < 4; ++layout) {
        const bool mx = scaling == Scaling::kMx, colwise = (layout & 2) != 0;
        for (std::vector<int32_t> sizes : some) {
          for (int64_t cols : mx ? std::vector<int64_t>{32, 96} : std::vector<int64_t>{0, 5, 68}) {
            const int64_t rows_each = random() % 2 == 0 ? 1 : 3;
            std::vector<int32_t> given = sizes;
            for (int32_t& size : given) size *= mx && colwise ? 32 : 1;
            if (mx && colwise && cols == 96) continue;  // as much again
            const auto qtype = static_cast<te::QType>(random() % (mx ? 2 : 3));
            check_grouped({given, 0, rows_each, cols, dtype, scaling, qtype, (layout & 1) != 0,
                           colwise, random() % 2 == 0},
                          random);
          }
        }
      }
    }
  }
  std::vector<int32_t> many(600);
  for (int32_t& size : many) size = static_cast<int32_t>(random() % 4);
  check_grouped({many, 0, 1, 8, DType::BF16, Scaling::kChannel, te::QType::kE4M3, true, true, true},
                random);
}

TEST(cuda_groups_that_cannot_be) {
  std::mt19937 random(42);
  for (Scaling scaling : kScalings) {
    for (int layout = 1; layout < 4; ++layout) {
      const bool rowwise = (layout & 1) != 0, colwise = (layout & 2) != 0;
      for (const std::vector<int32_t>& sizes :
           {std::vector<int32_t>{32, 33}, {65, -1}, {64, 1}, {INT32_MAX, INT32_MAX},
            {INT32_MIN, 64}, {96, -32}}) {
        check_refused({sizes, 64, 1, 64, DType::F32, scaling, te::QType::kE4M3, rowwise, colwise,
                       true},
                      random);
      }
      if (scaling == Scaling::kMx && colwise) {
        check_refused({{33, 31}, 64, 1, 64, DType::F32, scaling, te::QType::kE5M2, rowwise, true,
                       false},
                      random);
      }
    }
  }
}

}  // namespace

#endif
