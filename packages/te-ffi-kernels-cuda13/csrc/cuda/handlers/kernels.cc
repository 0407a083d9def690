// Handlers of kernels that take the arguments as the descriptions of their ops have them.

#include "cuda/handlers/handler.h"
#include "cuda/kernels/dequantize.h"
#include "cuda/kernels/topk.h"
#include "ffi/te_dequantize_call.h"
#include "ffi/topk_call.h"

namespace jaxtap::cuda {
namespace {

const KernelHandlers<ffi::DequantizeCall, dequantize> kDequantize;
const KernelHandlers<ffi::TopKCall, topk> kTopK;

}  // namespace
}  // namespace jaxtap::cuda
