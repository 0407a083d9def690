// Handlers of the router.

#include "ffi/call.h"
#include "ffi/floats.h"
#include "ffi/router_call.h"
#include "router/router.h"

namespace jaxtap::ffi {
namespace {

struct Bias {};

void Forward(const RouterForwardCall& given, const Parallel& parallel) {
  router::Forward args;
  given.Set(args);
  if (given.has_bias()) args.bias = ToFloats<Bias>(given.bias);
  router::forward(args, parallel);
}

const Handlers<RouterForwardCall, Forward> kForward;
const Handlers<RouterBackwardCall, router::backward> kBackward;

}  // namespace
}  // namespace jaxtap::ffi
