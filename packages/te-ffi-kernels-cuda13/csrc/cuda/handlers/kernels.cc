// Handlers of kernels that take the arguments as the descriptions of their ops have them.

#include "cuda/handlers/handler.h"
#include "cuda/kernels/dequantize.h"
#include "cuda/kernels/softmax.h"
#include "cuda/kernels/topk.h"
#include "ffi/softmax_call.h"
#include "ffi/te_dequantize_call.h"
#include "ffi/topk_call.h"

namespace jaxtap::cuda {
namespace {

const KernelHandlers<ffi::DequantizeCall, dequantize> kDequantize;
const KernelHandlers<ffi::TopKCall, topk> kTopK;

template <class Op>
using SoftmaxForwards = KernelHandlers<Op, softmax_forward>;
template <class Op>
using SoftmaxBackwards = KernelHandlers<Op, softmax_backward>;
const ffi::SoftmaxTargets<SoftmaxForwards, SoftmaxBackwards> kSoftmax;

}  // namespace
}  // namespace jaxtap::cuda
