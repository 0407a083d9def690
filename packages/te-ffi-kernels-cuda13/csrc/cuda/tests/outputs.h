// What quantization of numbers that an operation computes must give, by the CPU's quantizer.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/quantize.h"
#include "cuda/tests/kernels.h"
#include "te/quantize.h"
#include "tests/check.h"

namespace jaxtap::testing {

// Numbers as if they were computed.
class Made : public te::Source {
 public:
  Made(const std::vector<float>& numbers, int64_t cols) : numbers_(numbers), cols_(cols) {}

  void load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* out,
            int64_t stride) const override {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        out[i * stride + j] = numbers_[static_cast<size_t>((row + i) * cols_ + col + j)];
      }
    }
  }

 private:
  const std::vector<float>& numbers_;
  int64_t cols_;
};

struct OutputsCase {
  int64_t rows, cols;
  DType dtype;
  te::Scaling scaling;
  te::QType qtype;
  bool rowwise, colwise, wide;

  std::string text() const {
    return std::to_string(rows) + " x " + std::to_string(cols) + ", " + name(dtype) +
           ", scaling " + std::to_string(static_cast<int>(scaling)) + ", qtype " +
           std::to_string(static_cast<int>(qtype)) + (rowwise ? ", by row" : "") +
           (colwise ? ", by column" : "") + (wide ? ", aligned" : "");
  }
};

constexpr float kDelayedScale = 37.5f;

// The arguments of a kernel that writes to `found`, whose amax is `before`.
inline cuda::Quantize outputs_of(const OutputsCase& c, Results& found, float before) {
  set_element(found.amax.get(), DType::F32, 0, before);
  cuda::Quantize given;
  given.dtype = te::float_of(c.dtype);
  given.rows = c.rows;
  given.cols = c.cols;
  given.qtype = c.qtype;
  given.scaling = c.scaling;
  set_element(found.scale.get(), DType::F32, 0, kDelayedScale);
  given.scale = c.scaling == te::Scaling::kDelayedTensor
                    ? reinterpret_cast<const float*>(found.scale.get())
                    : nullptr;
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
  return given;
}

// Checks quantized values, scales and the largest magnitude.
inline void check_outputs(const OutputsCase& c, const Results& found,
                          const std::vector<float>& numbers, float before,
                          const std::string& what) {
  Results wanted(c.rows, c.cols, c.scaling, c.dtype, c.wide);
  const Made source(numbers, c.cols);
  const bool tensor = te::is_tensor(c.scaling);
  te::Quantize args;
  args.source = &source;
  args.dtype = te::float_of(c.dtype);
  args.rows = c.rows;
  args.cols = c.cols;
  args.qtype = c.qtype;
  args.scaling = c.scaling;
  args.scale = kDelayedScale;
  args.wants_absmax = true;
  float most = 0.0f;
  if (c.scaling == te::Scaling::kCurrentTensor) {
    args.rounded = true;
    most = te::quantize(args, Parallel());
    args.scale = te::tensor_scale(most, c.qtype);
  }
  if (c.rowwise) args.qvalues = wanted.qvalues.get();
  if (c.colwise) args.colwise = wanted.colwise.get();
  if (!tensor) args.scales = wanted.scales.get();
  if (!tensor) args.colwise_scales = wanted.colwise_scales.get();
  most = te::quantize(args, Parallel());
  if (tensor) {
    for (Buffer* one : {&wanted.scales, &wanted.colwise_scales}) {
      set_element(one->get(), DType::F32, 0, 1.0f / args.scale);
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
  const float amax = tensor && !(before >= most) ? most : before;
  CHECK_THAT(element(found.amax.get(), DType::F32, 0) == static_cast<double>(amax),
             what + ": amax");
}

// Calls check(case) at the sizes and layouts at which kernels part.
template <class Check>
void each_outputs_case(std::mt19937& random, Check&& check) {
  for (DType dtype : kFloats) {
    for (te::Scaling scaling : {te::Scaling::kDelayedTensor, te::Scaling::kCurrentTensor,
                                te::Scaling::kChannel, te::Scaling::kMx}) {
      const bool mx = scaling == te::Scaling::kMx;
      for (int layout = 1; layout < 4; ++layout) {
        const bool rowwise = (layout & 1) != 0, colwise = (layout & 2) != 0;
        const std::vector<int64_t> heights =
            mx && colwise ? std::vector<int64_t>{32, 96} : std::vector<int64_t>{0, 1, 65};
        const std::vector<int64_t> widths =
            mx && rowwise ? std::vector<int64_t>{32, 96} : std::vector<int64_t>{5, 68};
        for (int64_t rows : heights) {
          for (int64_t cols : widths) {
            if (!takes_case()) continue;
            const auto qtype = static_cast<te::QType>(random() % (mx ? 2 : 3));
            check(OutputsCase{rows, cols, dtype, scaling, qtype, rowwise, colwise,
                              random() % 2 == 0});
          }
        }
      }
    }
  }
}

}  // namespace jaxtap::testing
