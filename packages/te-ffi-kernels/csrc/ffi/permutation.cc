// Handlers that move tokens to experts and back.

#include "ffi/permutation_call.h"

#include <cstring>

#include "ffi/call.h"
#include "ffi/floats.h"

namespace jaxtap::ffi {
namespace {

struct Factors {};
struct FactorsGrad {};

void Clear(const Array& array) {
  if (array.data == nullptr) return;
  std::memset(array.data, 0, static_cast<size_t>(array.size()) * byte_size(array.dtype));
}

void Permute(const PermuteCall& given, const Parallel& parallel) {
  Clear(given.unwanted);
  permutation::permute(given.args, parallel);
}

void Unpermute(const UnpermuteCall& given, const Parallel& parallel) {
  permutation::Unpermute args = given.args;
  if (given.has_factors) args.factors = ToFloats<Factors>(given.factors);
  Clear(given.unwanted);
  permutation::unpermute(args, parallel);
}

void Gradient(const UnpermuteGradientCall& given, const Parallel& parallel) {
  permutation::UnpermuteGradient args = given.args;
  const int64_t count = given.factors.size();
  args.factors = ToFloats<Factors>(given.factors);
  args.factors_grad = Arena<FactorsGrad>::get_array<float>(count);
  permutation::unpermute_gradient(args, parallel);
  te::table().store[static_cast<int>(te::float_of(given.factors.dtype))](
      args.factors_grad, given.factors_grad.data, count);
}

const Handlers<MakeRowMapCall, permutation::make_row_map> kMakeMap;
const Handlers<PermuteCall, Permute> kPermute;
const Handlers<UnpermuteCall, Unpermute> kUnpermute;
const Handlers<UnpermuteGradientCall, Gradient> kGradient;

}  // namespace
}  // namespace jaxtap::ffi
