// Matmuls of groups by way of a cuBLASLt in memory against those of the CPU.
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/gemm/grouped.h"
#include "cuda/gemm/handles.h"
#include "cuda/tests/cublaslt_faults.h"
#include "cuda/tests/kernels.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)

namespace {

using namespace jaxtap;
using namespace jaxtap::cuda;
using namespace jaxtap::testing;
using te::Ragged;
using te::Scaling;

struct Groups {
  Scaling scaling;
  DType lhs, rhs;
  Ragged ragged;
  std::vector<int32_t> sizes;
  int64_t across, n;  // k of rows, or m
  bool lhs_first, rhs_first;
  te::Float out;
  bool bias;

  std::string text() const {
    std::string all;
    for (int32_t size : sizes) all += std::to_string(size) + " ";
    return all + "of " + std::to_string(across) + " x " + std::to_string(n) + ", " + name(lhs) +
           " and " + name(rhs) + ", scaling " + std::to_string(static_cast<int>(scaling)) +
           (ragged == Ragged::kRows ? ", rows" : ", contracted") + (lhs_first ? ", lhs first" : "") +
           (rhs_first ? ", rhs first" : "") + (bias ? ", bias" : "");
  }
};

// Floats, or quantized values without NaN and infinity; and scales.
struct Side {
  Side(DType dtype, int64_t count, int64_t scale_count, bool mx, std::mt19937& random)
      : data(numbers(count, DType::F32, true, 1.0f, random)),
        scales(mx ? scale_count : 4 * scale_count, 4) {
    if (byte_size(dtype) == 1) {
      Buffer bytes(count, 0);
      for (int64_t i = 0; i < count; ++i) {
        const auto qvalue = static_cast<uint8_t>(random());
        bytes.get()[i] = dtype == DType::S8
                             ? qvalue
                             : static_cast<uint8_t>((qvalue & 0x80) | qvalue % 0x58);
      }
      data = std::move(bytes);
    } else {
      data = numbers(count, dtype, true, 1.0f, random);
    }
    for (int64_t i = 0; i < scale_count; ++i) {
      if (mx) {
        scales.get()[i] = static_cast<uint8_t>(123 + random() % 8);
      } else {
        set_element(scales.get(), DType::F32, i, 0.5f + static_cast<float>(random() % 100) * 0.01f);
      }
    }
  }
  Buffer data, scales;
};

void check_groups(const Groups& c, std::mt19937& random) {
  if (!takes_case()) return;
  const auto groups = static_cast<int64_t>(c.sizes.size());
  const bool rows = c.ragged == Ragged::kRows, mx = c.scaling == Scaling::kMx;
  const int64_t rest = random() % 2 == 0 ? 0 : mx ? 32 : 3;
  const int64_t length = std::accumulate(c.sizes.begin(), c.sizes.end(), rest);
  const int64_t lhs_size = length * c.across;
  const int64_t rhs_size = rows ? groups * c.across * c.n : length * c.n;
  const bool channel = c.scaling == Scaling::kChannel;
  const Side lhs(c.lhs, lhs_size,
                 mx ? lhs_size / 32 : channel ? (rows ? length : groups * c.across) : groups, mx,
                 random);
  const Side rhs(c.rhs, rhs_size, mx ? rhs_size / 32 : channel ? groups * c.n : groups, mx, random);
  const DType dtype = kFloats[static_cast<int>(c.out)];
  const int64_t out_size = (rows ? length : groups * c.across) * c.n;
  const Buffer bias = numbers(groups * c.n, dtype, true, 1.0f, random);
  Buffer factors(8 * groups, 4), found(out_size * bytes_of(dtype), 0), wanted(found.size(), 0);
  std::vector<float> alpha;
  for (int64_t i = 0; i < groups; ++i) {
    alpha.push_back(0.5f + static_cast<float>(i));
    set_element(factors.get(), DType::F32, i, alpha.back());
    set_element(factors.get(), DType::F32, groups + i, 0.0f);
  }
  fill_nan(found);

  te::GroupedGemm args;
  args.ragged = c.ragged;
  args.groups = groups;
  args.length = length;
  te::Gemm& each = args.each;
  each.m = rows ? length : c.across;
  each.n = c.n;
  each.k = rows ? c.across : length;
  each.scaling = c.scaling;
  each.lhs = {lhs.data.get(), c.lhs, c.lhs_first, lhs.scales.get()};
  each.rhs = {rhs.data.get(), c.rhs, c.rhs_first, rhs.scales.get()};
  each.out_dtype = c.out;
  each.bias = c.bias ? bias.get() : nullptr;
  each.out = wanted.get();
  te::grouped_gemm(args, c.sizes.data(), alpha.data(), Parallel());

  FakeCublasLt lt;
  {
    OwnedHandle handle(lt);
    lt.create(handle.place());
    GemmPlan::Options options;
    options.has_bias = c.bias;
    options.fast = true;
    options.workspace =
        GemmWorkspace(each, c.bias).bytes + kWorkspaceAlignment + FakeCublasLt::kWorkspace;
    GroupedGemmPlan plan(lt, handle.get(), args, options);
    Buffer workspace(static_cast<int64_t>(options.workspace), 16);
    fill_nan(workspace);
    const auto* numbers = reinterpret_cast<const float*>(factors.get());
    each.out = found.get();
    for (int i = 0; i < 2; ++i) {
      plan.run(args, c.sizes.data(),
               {numbers, numbers + groups, workspace.get(), options.workspace}, nullptr);
    }
    std::vector<int32_t> different = c.sizes;
    std::sort(different.begin(), different.end());
    different.erase(std::unique(different.begin(), different.end()), different.end());
    const bool nothing = !different.empty() && different[0] == 0;
    CHECK_THAT(plan.plans() == different.size() - nothing, c.text() + ": plans");
  }
  CHECK(lt.left() == 0);
  double most = 1.0;
  for (int64_t i = 0; i < out_size; ++i) {
    most = std::fmax(most, std::fabs(element(wanted.get(), dtype, i)));
  }
  const double step = dtype == DType::F32 ? 2e-6 : dtype == DType::F16 ? 1e-3 : 8e-3;
  bool good = true;
  for (int64_t i = 0; i < out_size; ++i) {
    const double one = element(found.get(), dtype, i), other = element(wanted.get(), dtype, i);
    good = good && std::fabs(one - other) <= step * std::fabs(other) + 1e-5 * most;
  }
  CHECK_THAT(good, c.text());
}

TEST(cuda_grouped_gemm) {
  std::mt19937 random(61);
  const std::vector<std::vector<int32_t>> some = {{3}, {0, 5, 0, 17}, {1, 1, 0, 33, 2}, {0, 0}};
  for (const std::vector<int32_t>& sizes : some) {
    for (Ragged ragged : {Ragged::kRows, Ragged::kDepth}) {
      const bool rows = ragged == Ragged::kRows;
      for (bool lhs_first : {false, true}) {
        for (bool rhs_first : {false, true}) {
          for (DType dtype : kFloats) {
            check_groups({Scaling::kNone, dtype, dtype, ragged, sizes, 20, 12, lhs_first, rhs_first,
                          te::float_of(dtype), rows && random() % 2 == 0},
                         random);
          }
          // Sides that nothing is aligned to.
          check_groups({Scaling::kNone, DType::BF16, DType::BF16, ragged, sizes, 7, 9, lhs_first,
                        rhs_first, te::Float::kF32, rows},
                       random);
          for (Scaling scaling : {Scaling::kDelayedTensor, Scaling::kChannel}) {
            check_groups({scaling, DType::S8, DType::S8, ragged, sizes, 32, 16, lhs_first, rhs_first,
                          te::Float::kBF16, rows},
                         random);
            check_groups({scaling, DType::F8E4M3FN, DType::F8E5M2, ragged, sizes, 48, 24, lhs_first,
                          rhs_first, te::Float::kF32, false},
                         random);
          }
        }
      }
      std::vector<int32_t> blocks = sizes;
      for (int32_t& size : blocks) size *= rows ? 1 : 32;
      check_groups({Scaling::kMx, DType::F8E4M3FN, DType::F8E4M3FN, ragged, blocks, 64, 32, rows,
                    rows, te::Float::kF32, false},
                   random);
    }
  }
}

TEST(cuda_grouped_gemm_alignment) {
  te::GroupedGemm args;
  args.each.lhs.dtype = args.each.rhs.dtype = DType::BF16;
  args.each.m = 100;
  args.each.k = 64;
  args.each.n = 8;
  CHECK(grouped_alignment(args) == 16);
  args.each.k = 4;
  CHECK(grouped_alignment(args) == 8);
  args.each.n = 3;
  CHECK(grouped_alignment(args) == 4);
  args.each.scaling = Scaling::kDelayedTensor;
  args.each.n = 32;
  CHECK(grouped_alignment(args) == 16);
  args.length = 100;
  args.groups = 3;
  CHECK((even_sizes(args) == std::vector<int32_t>{33, 33, 33}));
  args.each.scaling = Scaling::kMx;
  args.ragged = Ragged::kDepth;
  CHECK((even_sizes(args) == std::vector<int32_t>{32, 32, 32}));
}

}  // namespace

#endif
