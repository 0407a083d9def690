// Handlers of topk.

#include "cuda/kernels/topk.h"

#include "cuda/handlers/handler.h"
#include "ffi/topk_call.h"

namespace jaxtap::cuda {
namespace {

void Run(const ffi::TopKCall& given, const Call& call) { topk(given.args, call.stream); }

const Handlers<ffi::TopKCall, Run> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
