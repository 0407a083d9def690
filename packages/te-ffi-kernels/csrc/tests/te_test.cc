// Transformer Engine's operations on buffers of exactly their size, at odd addresses, at edge
// sizes: quantized values and scales against conversions of single numbers, matmuls against double.
#include <cmath>

#include "common/isa.h"
#include "te/dequantize.h"
#include "te/gemm.h"
#include "te/quantize.h"
#include "tests/check.h"
#include "tests/narrow.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using te::QType;
using te::Float;
using te::Scaling;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};

uint8_t encoded(float x, QType qtype) {
  if (qtype == QType::kE4M3) return f32_to_f8e4m3fn_saturated(x);
  if (qtype == QType::kE5M2) return f32_to_f8e5m2_saturated(x);
  const float whole = std::nearbyint(std::fmin(std::fmax(x, -127.0f), 127.0f));
  return static_cast<uint8_t>(static_cast<int8_t>(whole));
}

double decoded(uint8_t qvalue, QType qtype) {
  if (qtype == QType::kE4M3) return static_cast<double>(f8e4m3fn_to_f32(qvalue));
  if (qtype == QType::kE5M2) return static_cast<double>(f8e5m2_to_f32(qvalue));
  return static_cast<double>(static_cast<int8_t>(qvalue));
}

// [rows, cols] of numbers, at an address that nothing is aligned to.
Buffer random_numbers(int64_t count, DType dtype, std::mt19937& random) {
  Buffer buffer(count * static_cast<int64_t>(byte_size(dtype)), dtype == DType::F32 ? 4 : 2);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (int64_t i = 0; i < count; ++i) set_element(buffer.get(), dtype, i, normal(random));
  return buffer;
}

struct Case {
  int64_t rows, cols;
  DType dtype;
  QType qtype;
  Scaling scaling;
};

void check_quantize(const Case& c, std::mt19937& random, const Parallel& parallel) {
  if (!takes_case()) return;
  const int64_t size = c.rows * c.cols;
  const bool mx = c.scaling == Scaling::kMx, channel = c.scaling == Scaling::kChannel;
  const Buffer x = random_numbers(size, c.dtype, random);
  Buffer qvalues(size, 1), colwise(size, 3);
  Buffer scales(mx ? size / 32 : channel ? 4 * c.rows : 4, mx ? 1 : 4);
  Buffer colwise_scales(mx ? size / 32 : channel ? 4 * c.cols : 4, mx ? 1 : 4);
  Buffer sums(c.cols * static_cast<int64_t>(byte_size(c.dtype)), c.dtype == DType::F32 ? 4 : 2);
  te::Quantize args;
  args.x = x.get();
  args.dtype = te::float_of(c.dtype);
  args.rows = c.rows;
  args.cols = c.cols;
  args.qtype = c.qtype;
  args.scaling = c.scaling;
  args.scale = 5.5f;
  args.qvalues = qvalues.get();
  args.colwise = colwise.get();
  args.scales = scales.get();
  args.colwise_scales = colwise_scales.get();
  args.sums = sums.get();
  args.wants_absmax = true;
  const float most = te::quantize(args, parallel);

  double largest = 0;
  bool good = true;
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t col = 0; col < c.cols; ++col) {
      const double number = element(x.get(), c.dtype, r * c.cols + col);
      largest = std::fmax(largest, std::fabs(number));
      const uint8_t qvalue = qvalues.get()[r * c.cols + col];
      const uint8_t other = colwise.get()[mx ? r * c.cols + col : col * c.rows + r];
      if (!mx && !channel) {
        const uint8_t wanted = encoded(static_cast<float>(number) * 5.5f, c.qtype);
        good = good && qvalue == wanted && other == wanted;
        continue;
      }
      const auto scale_of = [&](const Buffer& from, int64_t byte, int64_t index) {
        return mx ? std::ldexp(1.0, from.get()[byte] - 127)
                  : element(from.get(), DType::F32, index);
      };
      const double step = c.qtype == QType::kInt8 ? 0.51 : 0.0;
      const double part = c.qtype == QType::kE4M3 ? 0.07 : c.qtype == QType::kE5M2 ? 0.13 : 0.0;
      const auto near = [&](uint8_t found, double scale) {
        const double error = std::fabs(decoded(found, c.qtype) * scale - number);
        return error <= step * scale + part * std::fabs(number) + 0.01 * scale;
      };
      good = good && near(qvalue, scale_of(scales, r * (c.cols / 32) + col / 32, r));
      good = good && near(other, scale_of(colwise_scales, r / 32 * c.cols + col, col));
    }
  }
  for (int64_t col = 0; col < c.cols; ++col) {
    double sum = 0, size_of_it = 0;
    for (int64_t r = 0; r < c.rows; ++r) {
      sum += element(x.get(), c.dtype, r * c.cols + col);
      size_of_it += std::fabs(element(x.get(), c.dtype, r * c.cols + col));
    }
    const double found = element(sums.get(), c.dtype, col);
    good = good && std::fabs(found - sum) <= 0.01 * std::fabs(sum) + 1e-5 * size_of_it;
  }
  const std::string what = std::to_string(c.rows) + " x " + std::to_string(c.cols) + ", format " +
                           std::to_string(static_cast<int>(c.qtype)) + ", mode " +
                           std::to_string(static_cast<int64_t>(c.scaling)) + ", " + name(c.dtype);
  CHECK_THAT(good, what);
  CHECK_THAT(static_cast<double>(most) == largest, what);

  Buffer back(4 * size, 4);
  te::Dequantize undo;
  undo.qvalues = qvalues.get();
  undo.rows = c.rows;
  undo.cols = c.cols;
  undo.qtype = c.qtype;
  undo.scaling = c.scaling;
  const float inverse = 1.0f / 5.5f;
  undo.scales = mx || channel ? static_cast<const void*>(scales.get()) : &inverse;
  undo.out = back.get();
  te::dequantize(undo, parallel);
  bool equal = true;
  for (int64_t i = 0; i < size; ++i) {
    const float qvalue = static_cast<float>(decoded(qvalues.get()[i], c.qtype));
    const float scale = mx ? static_cast<float>(std::ldexp(1.0, scales.get()[i / 32] - 127))
                        : channel ? static_cast<float>(element(scales.get(), DType::F32, i / c.cols))
                                  : inverse;
    equal = equal && static_cast<float>(element(back.get(), DType::F32, i)) == qvalue * scale;
  }
  CHECK_THAT(equal, what);
}

TEST(te_quantize_and_dequantize) {
  std::mt19937 random(5);
  Threads pool(2);
  const Parallel two(pool), one;
  for (QType qtype : {QType::kE4M3, QType::kE5M2, QType::kInt8}) {
    for (DType dtype : kFloats) {
      for (int64_t rows : {0, 1, 7, 33, 64, 130}) {
        for (int64_t cols : {1, 15, 17, 65, 129, 1030}) {
          for (Scaling mode : {Scaling::kCurrentTensor, Scaling::kChannel}) {
            check_quantize({rows, cols, dtype, qtype, mode}, random, rows == 130 ? two : one);
          }
        }
      }
      if (qtype == QType::kInt8) continue;
      for (int64_t rows : {32, 96, 160}) {
        for (int64_t cols : {32, 64, 1056}) {
          check_quantize({rows, cols, dtype, qtype, Scaling::kMx}, random, two);
        }
      }
    }
  }
}

TEST(te_gemm) {
  std::mt19937 random(6);
  Threads pool(2);
  const Parallel two(pool);
  const int64_t sizes[] = {1, 3, 16, 17, 33, 97};
  for (DType dtype : kFloats) {
    for (int64_t m : sizes) {
      for (int64_t n : sizes) {
        for (int64_t k : {0, 1, 31, 64, 300}) {
          const bool lhs_first = (m + k) % 2 == 0, rhs_first = (n + k) % 2 == 0;
          const Buffer lhs = random_numbers(m * k, dtype, random);
          const Buffer rhs = random_numbers(n * k, dtype, random);
          const Buffer bias = random_numbers(n, dtype, random);
          Buffer out(m * n * static_cast<int64_t>(byte_size(dtype)), dtype == DType::F32 ? 4 : 2);
          te::Gemm args;
          args.m = m;
          args.n = n;
          args.k = k;
          args.lhs = {lhs.get(), dtype, lhs_first, nullptr};
          args.rhs = {rhs.get(), dtype, rhs_first, nullptr};
          args.out = out.get();
          args.out_dtype = te::float_of(dtype);
          args.bias = bias.get();
          te::gemm(args, two);
          bool good = true;
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
              double sum = element(bias.get(), dtype, j), most = std::fabs(sum);
              for (int64_t p = 0; p < k; ++p) {
                const double a = element(lhs.get(), dtype, lhs_first ? i * k + p : p * m + i);
                const double b = element(rhs.get(), dtype, rhs_first ? j * k + p : p * n + j);
                sum += a * b;
                most += std::fabs(a * b);
              }
              const double found = element(out.get(), dtype, i * n + j);
              const double rounding = dtype == DType::F32 ? 0 : dtype == DType::F16 ? 1e-3 : 8e-3;
              good = good && std::fabs(found - sum) <= rounding * std::fabs(sum) + 1e-5 * most;
            }
          }
          CHECK_THAT(good, std::to_string(m) + ", " + std::to_string(n) + ", " + std::to_string(k));
        }
      }
    }
  }
}

}  // namespace
