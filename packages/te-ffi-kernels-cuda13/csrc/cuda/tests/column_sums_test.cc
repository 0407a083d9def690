// Sums over rows in one stage and in two, on threads in software, against float64.
#include <cmath>
#include <functional>
#include <string>

#include "cuda/kernels/activation.h"
#include "cuda/kernels/column_sums.h"
#include "cuda/kernels/norm.h"
#include "cuda/kernels/quantize.h"
#include "cuda/tests/kernels.h"
#include "tests/check.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

TEST(cuda_parts_of_sums) {
  for (int64_t rows : {0, 1, 32, 33, 511, 512, 600, 4096, 100000, 1 << 24}) {
    for (int64_t cols : {0, 1, 32, 33, 4096, 20000}) {
      const cuda::SumParts parts = cuda::sum_parts(rows, cols);
      const std::string what = std::to_string(rows) + " x " + std::to_string(cols);
      CHECK_THAT(parts.count >= 1 && parts.count * parts.rows >= rows, what);
      CHECK_THAT(parts.count == 1 || (parts.count - 1) * parts.rows < rows, what);
      CHECK_THAT(parts.count == 1 || parts.rows >= 256, what);
      CHECK_THAT((cuda::sum_numbers(rows, cols, 2) == 0) == (parts.count == 1 || cols == 0), what);
    }
  }
  // A narrow array gives a large GPU work, and a wide one has enough in one stage.
  CHECK(cuda::sum_parts(1 << 20, 64).count == 256);
  CHECK(cuda::sum_parts(4096, 4096).count == 4);
  CHECK(cuda::sum_parts(1 << 20, 20000).count == 1);
}

#if !defined(__SANITIZE_THREAD__)  // it doesn't know of the threads in software

struct SumsCase {
  int64_t rows, cols;
  DType dtype;
};

// Calls check for rows of one part and of several, a part and a row more or less.
void each_case(const std::function<void(const SumsCase&)>& check) {
  for (DType dtype : kFloats) {
    for (int64_t rows : {1, 33, 511, 512, 513, 2100}) {
      for (int64_t cols : {1, 34, 64}) {
        if (takes_case()) check({rows, cols, dtype});
      }
    }
    check({0, 5, dtype});
    check({1000, 0, dtype});
  }
}

// Memory that must be written before it's read.
Buffer memory_of(const SumsCase& c, int64_t kinds) {
  Buffer memory(cuda::sum_numbers(c.rows, c.cols, kinds) * 4, 0);
  fill_nan(memory);
  return memory;
}

float* floats(Buffer& buffer) {
  return buffer.size() == 0 ? nullptr : reinterpret_cast<float*>(buffer.get());
}

// Whether found[j] is the sum of number(i, j), rounded to the dtype.
bool are_sums(const Buffer& found, const SumsCase& c, DType dtype,
              const std::function<double(int64_t, int64_t)>& number) {
  const double step = dtype == DType::F32 ? 0.0 : dtype == DType::F16 ? 5e-4 : 4e-3;
  bool good = true;
  for (int64_t j = 0; j < c.cols; ++j) {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < c.rows; ++i) {
      const double one = number(i, j);
      sum += one;
      size += std::fabs(one);
    }
    const double got = element(found.get(), dtype, j);
    good = good && std::fabs(got - sum) <= step * std::fabs(sum) + 1e-6 * size;
  }
  return good;
}

std::string text_of(const SumsCase& c) {
  return std::to_string(c.rows) + " x " + std::to_string(c.cols) + ", " + name(c.dtype);
}

TEST(cuda_sums_of_what_is_quantized) {
  std::mt19937 random(51);
  each_case([&](const SumsCase& c) {
    Buffer x = numbers(c.rows * c.cols, c.dtype, true, 1.0f, random);
    Buffer sums(c.cols * bytes_of(c.dtype), 0), parts = memory_of(c, 1);
    Buffer scale(4, 4), amax(4, 4), updated(4, 4);
    set_element(scale.get(), DType::F32, 0, 1.0f);
    set_element(amax.get(), DType::F32, 0, 0.0f);
    cuda::Quantize args;  // sums alone: no quantized values are wanted
    args.scale = floats(scale);
    args.amax = floats(amax);
    args.updated_amax = floats(updated);
    args.x = x.get();
    args.dtype = te::float_of(c.dtype);
    args.rows = c.rows;
    args.cols = c.cols;
    args.sums = sums.get();
    args.parts = floats(parts);
    cuda::quantize(args, nullptr);
    CHECK_THAT(are_sums(sums, c, c.dtype,
                        [&](int64_t i, int64_t j) {
                          return element(x.get(), c.dtype, i * c.cols + j);
                        }),
               text_of(c));
    if (parts.size() != 0) {
      args.parts = nullptr;
      CHECK(throws<Error>([&] { cuda::quantize(args, nullptr); }, "parts have no memory"));
    }
  });
}

TEST(cuda_sums_of_gradients_of_norms) {
  std::mt19937 random(52);
  each_case([&](const SumsCase& c) {
    Buffer x = numbers(c.rows * c.cols, c.dtype, true, 1.0f, random);
    Buffer dz = numbers(c.rows * c.cols, c.dtype, true, 1.0f, random);
    Buffer mean = numbers(c.rows, DType::F32, true, 0.1f, random);
    Buffer rsigma = numbers(c.rows, DType::F32, true, 1.0f, random);
    for (DType weights : {c.dtype, DType::F32}) {
      for (norms::Kind kind : {norms::Kind::kLayer, norms::Kind::kRms}) {
        const bool layer = kind == norms::Kind::kLayer;
        Buffer dgamma(c.cols * bytes_of(weights), 0), dbeta(c.cols * bytes_of(weights), 0);
        Buffer parts = memory_of(c, 2);
        cuda::NormGradient args;
        args.kind = kind;
        args.dz = dz.get();
        args.x = x.get();
        args.dtype = te::float_of(c.dtype);
        args.mean = floats(mean);
        args.rsigma = floats(rsigma);
        args.weights = te::float_of(weights);
        args.rows = c.rows;
        args.cols = c.cols;
        args.dgamma = dgamma.get();
        args.dbeta = layer ? dbeta.get() : nullptr;
        args.parts = floats(parts);
        cuda::norm_gradient_weights(args, nullptr);
        const auto slope = [&](int64_t i, int64_t j) {
          return element(dz.get(), c.dtype, i * c.cols + j);
        };
        const auto product = [&](int64_t i, int64_t j) {
          const double less = layer ? element(mean.get(), DType::F32, i) : 0.0;
          return slope(i, j) * (element(x.get(), c.dtype, i * c.cols + j) - less) *
                 element(rsigma.get(), DType::F32, i);
        };
        CHECK_THAT(are_sums(dgamma, c, weights, product), text_of(c) + ": dgamma");
        if (layer) CHECK_THAT(are_sums(dbeta, c, weights, slope), text_of(c) + ": dbeta");
      }
    }
  });
}

TEST(cuda_sums_of_gradients_of_activations) {
  std::mt19937 random(53);
  each_case([&](const SumsCase& given) {
    for (bool gated : {false, true}) {
      // x has both parts of a row one after the other, and so have the sums.
      SumsCase c = given;
      const int64_t n = c.cols;
      if (gated) c.cols *= 2;
      Buffer x = numbers(c.rows * c.cols, c.dtype, true, 1.0f, random);
      Buffer dz = numbers(c.rows * n, c.dtype, true, 1.0f, random);
      Buffer sums(c.cols * bytes_of(c.dtype), 0), parts = memory_of(c, 1);
      Buffer dx(c.rows * c.cols * bytes_of(c.dtype), 0), amax(4, 4), updated(4, 4);
      set_element(amax.get(), DType::F32, 0, 0.0f);
      cuda::Activation args;
      args.function = activations::Function::kRelu;
      args.gated = gated;
      args.dz = dz.get();
      args.x = x.get();
      args.dtype = te::float_of(c.dtype);
      args.rows = c.rows;
      args.cols = n;
      cuda::Quantize outputs;
      outputs.dtype = args.dtype;
      outputs.rows = c.rows;
      outputs.cols = c.cols;
      outputs.scaling = te::Scaling::kNone;
      outputs.sums = sums.get();
      outputs.parts = floats(parts);
      outputs.out = dx.get();
      outputs.amax = floats(amax);
      outputs.updated_amax = floats(updated);
      cuda::activation_backward(args, outputs, nullptr);
      const auto number = [&](int64_t i, int64_t j) {
        const double slope = element(dz.get(), c.dtype, i * n + j % n);
        const double first = element(x.get(), c.dtype, i * c.cols + j % n);
        if (!gated) return first > 0 ? slope : 0.0;
        const double second = element(x.get(), c.dtype, i * c.cols + n + j % n);
        if (j < n) return first > 0 ? slope * second : 0.0;
        return slope * (first > 0 ? first : 0.0);
      };
      CHECK_THAT(are_sums(sums, c, c.dtype, number), text_of(c) + (gated ? ", gated" : ""));
    }
  });
}

#endif

}  // namespace
