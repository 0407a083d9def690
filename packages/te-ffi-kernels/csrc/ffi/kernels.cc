// Handlers of kernels that take the arguments as the descriptions of their ops have them.

#include "depthwise/depthwise.h"
#include "ffi/call.h"
#include "ffi/convolution_call.h"
#include "ffi/dot_int8_call.h"
#include "ffi/quantize_int8_call.h"
#include "ffi/softmax_call.h"
#include "ffi/te_dequantize_call.h"
#include "ffi/topk_call.h"

namespace jaxtap::ffi {
namespace {

const Handlers<TopKCall, router::topk> kTopK;
const Handlers<DequantizeCall, te::dequantize> kDequantize;
const Handlers<QuantizeInt8Call, training::quantize_int8> kQuantizeInt8;
const Handlers<DotInt8Call, training::dot_int8> kDotInt8;

const Handlers<ConvolutionCall<kConvW8A8, 8>, convolution::convolve> kW8A8;
const Handlers<ConvolutionCall<kConvW4A8, 4>, convolution::convolve> kW4A8;
const Handlers<ConvolutionCall<kConvW8A16, 8, false>, depthwise::convolve> kW8A16;
const Handlers<ConvolutionCall<kConvW4A16, 4, false>, depthwise::convolve> kW4A16;

template <class Op>
using SoftmaxForward = Handlers<Op, softmax::forward>;
template <class Op>
using SoftmaxBackward = Handlers<Op, softmax::backward>;
const SoftmaxTargets<SoftmaxForward, SoftmaxBackward> kSoftmax;

}  // namespace
}  // namespace jaxtap::ffi
