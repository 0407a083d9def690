// What a convolution is given, checked, whatever platform it runs on.

#pragma once

#include <string>

#include "convolution/convolution.h"
#include "ffi/matmul_call.h"

namespace jaxtap::ffi {

inline constexpr char kConvW8A8[] = "te_ffi_kernels.conv_w8a8";
inline constexpr char kConvW4A8[] = "te_ffi_kernels.conv_w4a8";
// Of floats, depthwise.
inline constexpr char kConvW8A16[] = "te_ffi_kernels.conv_w8a16";
inline constexpr char kConvW4A16[] = "te_ffi_kernels.conv_w4a16";

struct ConvolutionConfig : MatmulConfig {
  template <class Attributes>
  ConvolutionConfig(const Attributes& attributes, int bits)
      : MatmulConfig(attributes, bits),
        groups(NeedAttribute<int64_t>(attributes, "groups")) {
    bias = Given(attributes, "bias");
    residual = Given(attributes, "residual");
    if (rotation != 0) throw invalid_argument("attribute rotation must be 0 in a convolution");
    if (layout.table_id != 0) throw invalid_argument("attribute table must be 0 in a convolution");
    ReadClamp(attributes, *this);
    const auto of = AttributeOr<int64_t>(attributes, "int8_of", 0);
    constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};
    if (of < 0 || of > 3) {
      throw invalid_argument("int8_of must be 0, or 1, 2 or 3 for int8 results of float32, bfloat16 "
                             "or float16, got ", of);
    }
    to_int8 = of != 0;
    if (to_int8) y_float = kFloats[of - 1];
    for (int i = 0; i < convolution::kDims; ++i) {
      const auto number = [&](const char* name, int64_t from) {
        const std::string whole = name + std::string("_") + std::to_string(i);
        const auto value = NeedAttribute<int64_t>(attributes, whole.c_str());
        if (value < from || value >= int64_t{1} << 31) {
          throw invalid_argument(whole, " must be from ", from, " to 2**31 - 1, got ", value);
        }
        return value;
      };
      convolution::Axis& axis = axes[i];
      axis.window = number("window", 1);
      axis.stride = number("stride", 1);
      axis.dilation = number("dilation", 1);
      axis.low = number("low", -(int64_t{1} << 31));
    }
  }

  int64_t groups;
  bool to_int8 = false;         // whether results are int8, with an operand y_scale
  DType y_float = DType::F32;   // then: what they are rounded to before
  convolution::Axis axes[convolution::kDims];  // without sizes
};

// A convolution of x[images, *sizes, channels], with 1 to 3 sizes: the last of `axes`. Its operands,
// of which all but the first two are there where an attribute says so:
//   x, buffer[panels, bytes], x_scale[], y_scale[], bias[n], residual like y
// Results are y, a float, or int8 where there is a y_scale.
template <const char* kName, int kBits, bool kToInt8 = true>
struct ConvolutionCall {
  static constexpr const char* kTarget = kName;
  static constexpr bool kQuantizes = kToInt8;  // activations
  struct Config : ConvolutionConfig {
    template <class Attributes>
    explicit Config(const Attributes& attributes) : ConvolutionConfig(attributes, kBits) {}
  };

  template <class Call>
  explicit ConvolutionCall(const Call& call) {
    const Config config(call.attributes);
    call.NeedCounts(
        2 + config.scaled + config.to_int8 + config.bias + config.residual, 1);
    const Array x = call.Operand(0, "x"), buffer = call.Operand(1, "buffer");
    const Array y = call.Result(0, "y");
    const int64_t dims = x.rank() - 2;
    if (dims < 1 || dims > convolution::kDims) {
      throw invalid_argument("x must have 3 to 5 axes, images, sizes and channels, got ", x.Text());
    }
    x.NeedDtype({DType::F32, DType::BF16, DType::F16, DType::S8});
    y.NeedRank(dims + 2);
    config.to_int8 ? y.NeedDtype({DType::S8}) : y.NeedDtype({DType::F32, DType::BF16, DType::F16});
    if (y.shape[0] != x.shape[0] || y.shape[dims + 1] != config.n) {
      throw invalid_argument("y must have the images of x and the attribute n, ", config.n,
                             ", as its first and last axis, got ", y.Text());
    }
    buffer.NeedRank(2).NeedDtype({DType::U8});
    args.x = x.data;
    args.x_dtype = x.dtype;
    args.images = x.shape[0];
    args.channels = x.shape[dims + 1];
    args.groups = config.groups;
    for (int i = 0; i < convolution::kDims; ++i) {
      args.axes[i] = config.axes[i];
      const int64_t axis = i + 1 - (convolution::kDims - dims);
      if (axis < 1) continue;  // of size 1
      args.axes[i].size = x.shape[axis];
      args.axes[i].out = y.shape[axis];
    }
    args.weights = {buffer.data, buffer.shape[0], buffer.shape[1], config.n, config.layout};
    args.y = y.data;
    args.y_dtype = config.to_int8 ? config.y_float : y.dtype;
    args.clamps = config.clamps;
    args.least = config.least;
    args.most = config.most;
    int64_t next = 2;
    if (config.scaled) {
      const Array given = call.Operand(next++, "x_scale");
      given.NeedDtype({DType::F32}).NeedShape({}, "that of a scalar");
      args.x_scale = static_cast<const float*>(given.data);
    }
    if (config.to_int8) {
      const Array given = call.Operand(next++, "y_scale");
      given.NeedDtype({DType::F32}).NeedShape({}, "that of a scalar");
      args.y_scale = static_cast<const float*>(given.data);
    }
    if (config.bias) {
      const Array given = call.Operand(next++, "bias");
      args.bias = given.NeedDtype({args.y_dtype}).NeedShape({config.n}, "the attribute n").data;
    }
    if (config.residual) {
      const Array given = call.Operand(next, "residual");
      given.NeedDtype({args.y_dtype}).NeedRank(y.rank());
      for (int64_t i = 0; i < y.rank(); ++i) {
        if (given.shape[i] == y.shape[i]) continue;
        throw invalid_argument("residual must have the shape of y, ", y.Text(), ", got ",
                               given.Text());
      }
      args.residual = given.data;
    }
  }

  convolution::Args args;
};

}  // namespace jaxtap::ffi
