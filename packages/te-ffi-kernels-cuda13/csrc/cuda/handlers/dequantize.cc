// Handlers of dequantize.

#include "cuda/kernels/dequantize.h"

#include "cuda/handlers/handler.h"
#include "ffi/te_dequantize_call.h"

namespace jaxtap::cuda {
namespace {

void Run(const ffi::DequantizeCall& given, const Call& call) { dequantize(given.args, call.stream); }

const Handlers<ffi::DequantizeCall, Run> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
