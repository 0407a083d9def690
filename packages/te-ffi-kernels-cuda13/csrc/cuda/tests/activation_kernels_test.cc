// The activations' CUDA kernels, on threads in software: numbers against the CPU's, quantized
// values against those of the same numbers.
#include <cmath>
#include <string>
#include <vector>

#include "activations/activations.h"
#include "cuda/kernels/activation.h"
#include "cuda/tests/kernels.h"
#include "cuda/tests/outputs.h"
#include "te/quantize.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using activations::Function;

struct ActivationCase {
  int64_t rows, cols;  // of one part
  DType dtype;
  Function function;
  bool gated, gradient, wide, bad;

  int64_t parts() const { return gated ? 2 : 1; }
  int64_t columns() const { return gradient ? parts() * cols : cols; }  // of results

  std::string text() const {
    return std::to_string(rows) + " x " + std::to_string(cols) + ", " + name(dtype) +
           ", function " + std::to_string(static_cast<int>(function)) + (gated ? ", gated" : "") +
           (gradient ? ", gradient" : "") + (wide ? ", aligned" : "") + (bad ? ", not finite" : "");
  }
};

struct Arrays {
  Arrays(const ActivationCase& c, std::mt19937& random)
      : x(numbers(c.rows * c.parts() * c.cols, c.dtype, c.wide, 4.0f, random)),
        dz(numbers(c.rows * c.cols, c.dtype, c.wide, 1.0f, random)) {
    if (c.bad) spoil(x, c.rows * c.parts() * c.cols, c.dtype, random);
  }

  cuda::Activation args(const ActivationCase& c) {
    cuda::Activation args;
    args.function = c.function;
    args.gated = c.gated;
    args.params = {3.0f, 1.5f, 0.5f};
    args.dz = c.gradient ? dz.get() : nullptr;
    args.x = x.get();
    args.dtype = te::float_of(c.dtype);
    args.rows = c.rows;
    args.cols = c.cols;
    return args;
  }

  Buffer x, dz;
};

void run(const ActivationCase& c, const cuda::Activation& args, const cuda::Quantize& outputs) {
  (c.gradient ? cuda::activation_backward : cuda::activation_forward)(args, outputs, nullptr);
}

// Sums over rows of numbers, with room for another order of adding and for what they're rounded to.
bool sums_are(const Buffer& found, const std::vector<float>& numbers, int64_t rows, int64_t cols,
              DType dtype) {
  for (int64_t j = 0; j < cols; ++j) {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const auto number = static_cast<double>(numbers[static_cast<size_t>(i * cols + j)]);
      sum += number;
      size += std::fabs(number);
    }
    const double got = element(found.get(), dtype, j);
    if (!std::isfinite(size) || size > 6e4) {
      if (std::isfinite(size) || !std::isfinite(got)) continue;
      return false;
    }
    const double step = dtype == DType::F32 ? 0.0 : dtype == DType::F16 ? 5e-4 : 4e-3;
    if (!(std::fabs(got - sum) <= step * std::fabs(sum) + 2e-6 * size + 1e-7)) return false;
  }
  return true;
}

// What is computed, in float32: that of the same numbers of that dtype.
std::vector<float> numbers_of(const ActivationCase& c, Arrays& arrays) {
  std::vector<float> x(static_cast<size_t>(c.rows * c.parts() * c.cols));
  std::vector<float> dz(static_cast<size_t>(c.rows * c.cols));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(element(arrays.x.get(), c.dtype, static_cast<int64_t>(i)));
  }
  for (size_t i = 0; i < dz.size(); ++i) {
    dz[i] = static_cast<float>(element(arrays.dz.get(), c.dtype, static_cast<int64_t>(i)));
  }
  std::vector<float> out(static_cast<size_t>(c.rows * c.columns()));
  std::vector<float> amax(1);  // from the heap, as all that kernels read and write
  cuda::Activation args = arrays.args(c);
  args.dz = c.gradient ? dz.data() : nullptr;
  args.x = x.data();
  args.dtype = te::Float::kF32;
  cuda::Quantize outputs;
  outputs.rows = c.rows;
  outputs.cols = c.columns();
  outputs.scaling = te::Scaling::kNone;
  outputs.amax = outputs.updated_amax = amax.data();
  outputs.out = out.data();
  run(c, args, outputs);
  return out;
}

void check_numbers(const ActivationCase& c, std::mt19937& random) {
  if (!takes_case()) return;
  const std::string what = c.text();
  const int64_t size = c.rows * c.columns();
  const float before = random() % 2 == 0 ? 0.25f : 1e9f;
  const bool counts = random() % 2 == 0;
  Arrays arrays(c, random);
  Buffer found(size * bytes_of(c.dtype), misalign(c.dtype, c.wide)), amax(4, 4);
  Buffer wanted(size * bytes_of(c.dtype), misalign(c.dtype, c.wide));
  Buffer sums(c.columns() * bytes_of(c.dtype), misalign(c.dtype, c.wide));
  set_element(amax.get(), DType::F32, 0, before);
  const cuda::Activation args = arrays.args(c);
  cuda::Quantize outputs;
  outputs.dtype = args.dtype;
  outputs.rows = c.rows;
  outputs.cols = c.columns();
  outputs.scaling = te::Scaling::kNone;
  outputs.amax = outputs.updated_amax = reinterpret_cast<float*>(amax.get());
  outputs.wants_absmax = counts;
  outputs.out = found.get();
  if (c.gradient) outputs.sums = sums.get();
  run(c, args, outputs);

  activations::Operands operands;
  operands.activation = {c.function, c.gated};
  operands.params = args.params;
  operands.dz = args.dz;
  operands.x = args.x;
  operands.dtype = args.dtype;
  operands.cols = c.cols;
  const activations::Activated forward(operands);
  const activations::Derived backward(operands);
  te::Quantize quantize;
  quantize.source = c.gradient ? static_cast<const te::Source*>(&backward) : &forward;
  quantize.dtype = args.dtype;
  quantize.rows = c.rows;
  quantize.cols = c.columns();
  quantize.scaling = te::Scaling::kNone;
  quantize.out = wanted.get();
  quantize.wants_absmax = true;
  const auto most = static_cast<double>(te::quantize(quantize, Parallel()));
  CHECK_THAT(near(found, wanted, c.dtype, size), what);
  const double updated = element(amax.get(), DType::F32, 0);
  const double largest = counts ? std::fmax(most, static_cast<double>(before)) : before;
  CHECK_THAT(updated == largest || std::fabs(updated - largest) <= 2e-6 * largest, what + ": amax");
  if (c.gradient) {
    CHECK_THAT(sums_are(sums, numbers_of(c, arrays), c.rows, c.columns(), c.dtype),
               what + ": sums");
  }
}

TEST(cuda_activations) {
  std::mt19937 random(21);
  for (DType dtype : kFloats) {
    for (int function = 0; function < activations::kFunctions; ++function) {
      for (bool gated : {false, true}) {
        for (bool gradient : {false, true}) {
          for (bool wide : {false, true}) {
            for (int64_t cols : {0, 1, 5, 64, 72}) {
              check_numbers({cols == 64 ? 40 : 3, cols, dtype, static_cast<Function>(function),
                             gated, gradient, wide, random() % 3 == 0},
                            random);
            }
            check_numbers({0, 4, dtype, static_cast<Function>(function), gated, gradient, wide,
                           false},
                          random);
          }
        }
      }
    }
  }
}

TEST(cuda_activation_quantized) {
  std::mt19937 random(22);
  for (bool gradient : {false, true}) {
    for (bool gated : {false, true}) {
      each_outputs_case(random, [&](OutputsCase c) {
        const auto function = static_cast<Function>(random() % activations::kFunctions);
        const ActivationCase of = {c.rows, c.cols, c.dtype, function, gated, gradient, c.wide,
                                   random() % 4 == 0};
        c.cols = of.columns();
        Arrays arrays(of, random);
        const float before = random() % 2 == 0 ? 0.5f : 1e9f;
        Results found(c.rows, c.cols, c.scaling, c.dtype, c.wide);
        cuda::Quantize outputs = outputs_of(c, found, before);
        if (gradient) outputs.sums = found.sums.get();
        run(of, arrays.args(of), outputs);
        std::vector<float> numbers = numbers_of(of, arrays);
        check_outputs(c, found, numbers, before, c.text() + "; " + of.text());
        if (!gradient) return;
        if (c.scaling == te::Scaling::kCurrentTensor) {
          Buffer one(bytes_of(c.dtype), 0);
          for (float& number : numbers) {
            set_element(one.get(), c.dtype, 0, number);
            number = static_cast<float>(element(one.get(), c.dtype, 0));
          }
        }
        CHECK_THAT(sums_are(found.sums, numbers, c.rows, c.cols, c.dtype), c.text() + ": sums");
      });
    }
  }
}

}  // namespace

#endif
