// The CUDA kernels, on threads in software, against those of the CPU: on buffers of exactly their
// size, at aligned addresses and at odd ones, at edge sizes.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda/kernels/dequantize.h"
#include "cuda/kernels/quantize.h"
#include "cuda/kernels/softmax.h"
#include "cuda/tests/fake_runtime.h"
#include "cuda/tests/kernels.h"
#include "softmax/softmax.h"
#include "te/dequantize.h"
#include "te/quantize.h"
#include "tests/check.h"

namespace jaxtap::cuda {

Runtime& runtime() {
  static testing::FakeRuntime fake;
  return fake;
}

}  // namespace jaxtap::cuda

#if !defined(__SANITIZE_THREAD__)  // it doesn't know of fibers, and there is one thread

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using te::QType;
using te::Scaling;

struct Case {
  int64_t rows, cols;
  DType dtype;
  Scaling scaling;
  QType qtype;
  bool rowwise, colwise, wide;
};

void check_quantize(const Case& c, std::mt19937& random) {
  if (!takes_case()) return;
  const std::string what = std::to_string(c.rows) + " x " + std::to_string(c.cols) + ", " +
                           name(c.dtype) + ", scaling " +
                           std::to_string(static_cast<int>(c.scaling)) + ", qtype " +
                           std::to_string(static_cast<int>(c.qtype)) +
                           (c.rowwise ? ", by row" : "") + (c.colwise ? ", by column" : "") +
                           (c.wide ? ", aligned" : "");
  Buffer x = numbers(c.rows * c.cols, c.dtype, c.wide, 3.0f, random);
  if (random() % 2 == 0) spoil(x, c.rows * c.cols, c.dtype, random);
  const bool tensor = te::is_tensor(c.scaling);
  const float scale = 37.5f, before = random() % 2 == 0 ? 0.5f : 100.0f;

  Results wanted(c.rows, c.cols, c.scaling, c.dtype, c.wide);
  te::Quantize args;
  args.x = x.get();
  args.dtype = te::float_of(c.dtype);
  args.rows = c.rows;
  args.cols = c.cols;
  args.qtype = c.qtype;
  args.scaling = c.scaling;
  args.scale = scale;
  if (c.rowwise) args.qvalues = wanted.qvalues.get();
  if (c.colwise) args.colwise = wanted.colwise.get();
  if (!tensor) args.scales = wanted.scales.get();
  if (!tensor) args.colwise_scales = wanted.colwise_scales.get();
  args.sums = wanted.sums.get();
  args.wants_absmax = true;
  const float most = te::quantize(args, Parallel());

  Results found(c.rows, c.cols, c.scaling, c.dtype, c.wide);
  set_element(found.amax.get(), DType::F32, 0, before);
  cuda::Quantize given;
  given.x = x.get();
  given.dtype = args.dtype;
  given.rows = c.rows;
  given.cols = c.cols;
  given.qtype = c.qtype;
  given.scaling = c.scaling;
  set_element(found.scale.get(), DType::F32, 0, scale);
  given.scale = reinterpret_cast<const float*>(found.scale.get());
  given.amax = reinterpret_cast<const float*>(found.amax.get());
  given.updated_amax = reinterpret_cast<float*>(found.amax.get());  // donated
  if (c.rowwise) {
    given.qvalues = found.qvalues.get();
    given.scales = found.scales.get();
  }
  if (c.colwise) {
    given.colwise = found.colwise.get();
    given.colwise_scales = found.colwise_scales.get();
  }
  given.sums = found.sums.get();
  cuda::quantize(given, nullptr);

  if (tensor) {
    for (Buffer* one : {&wanted.scales, &wanted.colwise_scales}) {
      set_element(one->get(), DType::F32, 0, 1.0f / scale);
    }
  }
  if (c.rowwise) {
    CHECK_THAT(same(found.qvalues, wanted.qvalues), what + ": quantized values");
    CHECK_THAT(same(found.scales, wanted.scales), what + ": scales");
  }
  if (c.colwise) {
    CHECK_THAT(same(found.colwise, wanted.colwise), what + ": quantized values by column");
    CHECK_THAT(same(found.colwise_scales, wanted.colwise_scales), what + ": scales by column");
  }
  const double amax = element(found.amax.get(), DType::F32, 0);
  CHECK_THAT(amax == static_cast<double>(tensor ? std::fmax(before, most) : before),
             what + ": amax");
  bool sums = true;
  for (int64_t j = 0; j < c.cols; ++j) {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < c.rows; ++i) {
      const double number = element(x.get(), c.dtype, i * c.cols + j);
      sum += number;
      size += std::fabs(number);
    }
    const double got = element(found.sums.get(), c.dtype, j);
    if (!std::isfinite(size)) {
      sums = sums && !std::isfinite(got);
      continue;
    }
    const double step = c.dtype == DType::F32 ? 0.0 : c.dtype == DType::F16 ? 5e-4 : 4e-3;
    sums = sums && std::fabs(got - sum) <= step * std::fabs(sum) + 2e-6 * size;
  }
  CHECK_THAT(sums, what + ": sums");
}

TEST(cuda_quantize) {
  std::mt19937 random(5);
  for (DType dtype : kFloats) {
    for (Scaling scaling : {Scaling::kDelayedTensor, Scaling::kChannel, Scaling::kMx}) {
      const bool mx = scaling == Scaling::kMx;
      {
        const int qtype = static_cast<int>(random() % (mx ? 2 : 3));
        for (int layout = 1; layout < 4; ++layout) {
          for (bool wide : {false, true}) {
            const bool rowwise = (layout & 1) != 0, colwise = (layout & 2) != 0;
            const std::vector<int64_t> heights =
                mx && colwise ? std::vector<int64_t>{32, 96} : std::vector<int64_t>{0, 1, 65};
            const std::vector<int64_t> widths =
                mx && rowwise ? std::vector<int64_t>{32, 96} : std::vector<int64_t>{0, 5, 68};
            for (int64_t rows : heights) {
              for (int64_t cols : widths) {
                check_quantize({rows, cols, dtype, scaling, static_cast<QType>(qtype), rowwise,
                                colwise, wide},
                               random);
              }
            }
          }
        }
      }
    }
  }
}

TEST(cuda_dequantize) {
  std::mt19937 random(6);
  for (DType dtype : kFloats) {
    for (Scaling scaling : {Scaling::kCurrentTensor, Scaling::kChannel, Scaling::kMx}) {
      for (bool by_column : {false, true}) {
        for (bool wide : {false, true}) {
          for (int64_t rows : {0, 1, 32, 64}) {
            for (int64_t cols : {1, 32, 33, 160}) {
              const bool mx = scaling == Scaling::kMx;
              if (mx && (by_column ? rows : cols) % 32 != 0) continue;
              if (!takes_case()) continue;
              Buffer qvalues(rows * cols, wide ? 0 : 1);
              for (int64_t i = 0; i < qvalues.size(); ++i) {
                qvalues.get()[i] = static_cast<uint8_t>(random());
              }
              Buffer scales(mx ? rows * cols / 32 : 4 * std::max<int64_t>(rows, 1), mx ? 1 : 4);
              for (int64_t i = 0; i < (mx ? scales.size() : std::max<int64_t>(rows, 1)); ++i) {
                if (mx) {
                  scales.get()[i] = static_cast<uint8_t>(random());
                } else {
                  set_element(scales.get(), DType::F32, i,
                              static_cast<float>(random() % 1000) * 0.01f);
                }
              }
              for (int qtype = 0; qtype < (mx ? 2 : 3); ++qtype) {
                Buffer wanted(rows * cols * bytes_of(dtype), misalign(dtype, wide));
                Buffer found(rows * cols * bytes_of(dtype), misalign(dtype, wide));
                te::Dequantize args;
                args.qvalues = qvalues.get();
                args.rows = rows;
                args.cols = cols;
                args.qtype = static_cast<QType>(qtype);
                args.scaling = scaling;
                args.scales = scales.get();
                args.by_column = by_column;
                args.out = wanted.get();
                args.dtype = te::float_of(dtype);
                te::dequantize(args, Parallel());
                cuda::Dequantize given;
                given.qvalues = qvalues.get();
                given.rows = rows;
                given.cols = cols;
                given.qtype = args.qtype;
                given.scaling = scaling;
                given.scales = scales.get();
                given.by_column = by_column;
                given.out = found.get();
                given.dtype = args.dtype;
                cuda::dequantize(given, nullptr);
                bool good = true;
                for (int64_t i = 0; i < rows * cols; ++i) {
                  const double one = element(found.get(), dtype, i);
                  const double other = element(wanted.get(), dtype, i);
                  good = good && (one == other || (std::isnan(one) && std::isnan(other)));
                }
                CHECK_THAT(good, std::to_string(rows) + " x " + std::to_string(cols) + ", scaling " +
                                     std::to_string(static_cast<int>(scaling)) + ", qtype " +
                                     std::to_string(qtype) + ", " + name(dtype));
              }
            }
          }
        }
      }
    }
  }
}

struct Rows {
  int64_t batch, heads, q, k, masks;  // no masks: 0
  DType dtype;
  bool causal, wide, bad;
};

void check_softmax(const Rows& c, std::mt19937& random) {
  if (!takes_case()) return;
  const int64_t size = c.batch * c.heads * c.q * c.k;
  const std::string what = std::to_string(c.batch) + " x " + std::to_string(c.heads) + " x " +
                           std::to_string(c.q) + " x " + std::to_string(c.k) + ", " +
                           std::to_string(c.masks) + " masks, " + name(c.dtype) +
                           (c.causal ? ", causal" : "") + (c.wide ? ", aligned" : "") +
                           (c.bad ? ", not finite" : "");
  Buffer x = numbers(size, c.dtype, c.wide, 3.0f, random);
  if (c.bad) spoil(x, size, c.dtype, random);
  Buffer mask(c.masks * c.q * c.k, c.wide ? 0 : 1);
  for (int64_t i = 0; i < mask.size(); ++i) {
    mask.get()[i] = i < c.k ? 1 : static_cast<uint8_t>(random() % 3);
  }
  Buffer wanted(size * bytes_of(c.dtype), misalign(c.dtype, c.wide));
  Buffer found(size * bytes_of(c.dtype), misalign(c.dtype, c.wide));
  softmax::Forward args;
  args.shape = {c.batch, c.heads, c.q, c.k, te::float_of(c.dtype), c.causal};
  args.scale = -0.7f;
  args.x = x.get();
  args.mask = c.masks == 0 ? nullptr : mask.get();
  args.masks = c.masks == 0 ? 1 : c.masks;
  args.out = wanted.get();
  softmax::forward(args, Parallel());
  cuda::SoftmaxForward given;
  given.shape = {c.batch, c.heads, c.q, c.k, args.shape.dtype, c.causal};
  given.scale = args.scale;
  given.x = x.get();
  given.mask = args.mask;
  given.masks = args.masks;
  given.out = found.get();
  cuda::softmax_forward(given, nullptr);
  CHECK_THAT(near(found, wanted, c.dtype, size), what);

  Buffer grad = numbers(size, c.dtype, c.wide, 1.0f, random);
  Buffer slope(size * bytes_of(c.dtype), misalign(c.dtype, c.wide));
  Buffer wanted_slope(size * bytes_of(c.dtype), misalign(c.dtype, c.wide));
  softmax::Backward undo;
  undo.shape = args.shape;
  undo.scale = args.scale;
  undo.grad = grad.get();
  undo.softmax = wanted.get();
  undo.out = wanted_slope.get();
  softmax::backward(undo, Parallel());
  cuda::SoftmaxBackward back;
  back.shape = given.shape;
  back.scale = args.scale;
  back.grad = grad.get();
  back.softmax = wanted.get();
  back.out = slope.get();
  cuda::softmax_backward(back, nullptr);
  CHECK_THAT(near(slope, wanted_slope, c.dtype, size), what + ": gradient");
}

TEST(cuda_softmax) {
  std::mt19937 random(7);
  for (DType dtype : kFloats) {
    for (bool wide : {false, true}) {
      for (int64_t k : {0, 1, 7, 33, 256, 260, 1024, 1025, 4104}) {
        const int64_t q = k > 1024 ? 2 : 5;
        for (bool bad : {false, true}) {
          check_softmax({2, 3, q, k, 0, dtype, false, wide, bad}, random);
          check_softmax({1, 2, q, k, 0, dtype, true, wide, bad}, random);
          check_softmax({4, 2, q, k, 2, dtype, false, wide, bad}, random);
        }
        check_softmax({2, 1, 0, k, 1, dtype, false, wide, false}, random);
      }
    }
  }
}

TEST(cuda_softmax_of_infinite_rows) {
  for (int64_t k : {4, 300, 2000}) {
    for (int64_t left : {0, 1, 2}) {  // numbers that aren't -infinity
      Buffer x(4 * k, 0), out(4 * k, 0);
      for (int64_t i = 0; i < k; ++i) set_element(x.get(), DType::F32, i, -kInfinity);
      for (int64_t i = 0; i < left; ++i) set_element(x.get(), DType::F32, k - 1 - i, 1.0f);
      cuda::SoftmaxForward args;
      args.shape = {1, 1, 1, k, te::Float::kF32, false};
      args.x = x.get();
      args.out = out.get();
      cuda::softmax_forward(args, nullptr);
      const double first = element(out.get(), DType::F32, 0);
      const double last = element(out.get(), DType::F32, k - 1);
      if (left == 0) {
        CHECK(std::isnan(first) && std::isnan(last));
      } else {
        CHECK(first == 0.0 && std::fabs(last - 1.0 / static_cast<double>(left)) < 1e-6);
      }
    }
  }
}

}  // namespace

#endif
