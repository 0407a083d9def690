// Handlers of the six softmax targets.

#include "cuda/kernels/softmax.h"

#include "cuda/handlers/handler.h"
#include "ffi/softmax_call.h"

namespace jaxtap::cuda {
namespace {

template <class Op>
void Forward(const Op& given, const Call& call) {
  if (given.args.shape.rows() * given.args.shape.k != 0) softmax_forward(given.args, call.stream);
}

template <class Op>
void Backward(const Op& given, const Call& call) {
  if (given.args.shape.rows() * given.args.shape.k != 0) softmax_backward(given.args, call.stream);
}

template <class Op>
using ForwardHandlers = Handlers<Op, Forward<Op>>;
template <class Op>
using BackwardHandlers = Handlers<Op, Backward<Op>>;

const ffi::SoftmaxTargets<ForwardHandlers, BackwardHandlers> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
