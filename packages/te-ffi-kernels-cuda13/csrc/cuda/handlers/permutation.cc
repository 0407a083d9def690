// Handlers that move tokens to experts and back.

#include "cuda/kernels/permutation.h"

#include "cuda/handlers/handler.h"
#include "ffi/permutation_call.h"

namespace jaxtap::cuda {
namespace {

void RunPermute(const ffi::PermuteCall& given, const Call& call) {
  call.Clear({call.Result(0, "output"), call.Result(1, "permuted_probs")});
  permute(given.args, call.stream);
}

void RunUnpermute(const ffi::UnpermuteCall& given, const Call& call) {
  Unpermute args = {};
  static_cast<permutation::Unpermute&>(args) = given.args;
  if (given.has_factors) {
    args.given_factors = given.factors.data;
    args.factors_dtype = te::float_of(given.factors.dtype);
  }
  call.Clear({call.Result(1, "unpermuted_probs")});
  unpermute(args, call.stream);
}

void RunGradient(const ffi::UnpermuteGradientCall& given, const Call& call) {
  UnpermuteGradient args = {};
  static_cast<permutation::UnpermuteGradient&>(args) = given.args;
  args.given_factors = given.factors.data;
  args.factors_dtype = te::float_of(given.factors.dtype);
  args.given_factors_grad = given.factors_grad.data;
  call.Clear({call.Result(0, "inp_grad"), given.factors_grad});
  unpermute_gradient(args, call.stream);
}

const KernelHandlers<ffi::MakeRowMapCall, make_row_map> kMakeMap;
const Handlers<ffi::PermuteCall, RunPermute> kPermute;
const Handlers<ffi::UnpermuteCall, RunUnpermute> kUnpermute;
const Handlers<ffi::UnpermuteGradientCall, RunGradient> kGradient;

}  // namespace
}  // namespace jaxtap::cuda
