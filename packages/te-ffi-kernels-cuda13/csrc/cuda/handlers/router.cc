// Handlers of the router.

#include "cuda/kernels/router.h"

#include "cuda/handlers/handler.h"
#include "ffi/router_call.h"

namespace jaxtap::cuda {
namespace {

void Forward(const ffi::RouterForwardCall& given, const Call& call) {
  RouterForward args;
  given.Set(args);
  if (given.has_bias()) {
    args.bias = given.bias.data;
    args.bias_dtype = te::float_of(given.bias.dtype);
  }
  router_forward(args, call.stream);
}

const Handlers<ffi::RouterForwardCall, Forward> kForward;
const KernelHandlers<ffi::RouterBackwardCall, router_backward> kBackward;

}  // namespace
}  // namespace jaxtap::cuda
