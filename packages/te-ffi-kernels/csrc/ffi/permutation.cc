// Handlers that move tokens to experts and back.

#include "ffi/permutation_call.h"

#include <cstring>
#include <vector>

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

// Two tokens of some numbers, the first of them on the one row that there is.
struct Little {
  int32_t entries[6] = {0, 0, 1, 1, 0, 0};
  float x[32] = {}, y[32] = {}, factors[2] = {1.0f, 1.0f}, more[2] = {};

  permutation::RowMap map() const {
    permutation::RowMap map;
    map.entries = entries;
    map.tokens = 2;
    map.experts = map.rows = 1;
    return map;
  }
};

void MakeMap(const MakeRowMapCall& given, const Parallel& parallel) {
  permutation::make_row_map(given.args, parallel);
}

void Permute(const PermuteCall& given, const Parallel& parallel) {
  Clear(given.unwanted);
  permutation::permute(given.args, parallel);
}

void WarmUnpermute(const NoConfig&) {
  for (te::Float dtype : {te::Float::kF32, te::Float::kBF16, te::Float::kF16}) {
    Little little;
    permutation::Unpermute args;
    args.map = little.map();
    args.x = little.x;
    args.dtype = dtype;
    args.cols = 16;
    args.factors = little.factors;
    args.out = little.y;
    permutation::unpermute(args, Parallel());
  }
}

void Unpermute(const UnpermuteCall& given, const Parallel& parallel) {
  permutation::Unpermute args = given.args;
  if (given.has_factors) args.factors = ToFloats<Factors>(given.factors);
  Clear(given.unwanted);
  permutation::unpermute(args, parallel);
}

void WarmGradient(const NoConfig&) {
  for (te::Float dtype : {te::Float::kF32, te::Float::kBF16, te::Float::kF16}) {
    Little little;
    permutation::UnpermuteGradient args;
    args.map = little.map();
    args.grad = args.x = little.x;
    args.dtype = dtype;
    args.cols = 16;
    args.factors = little.factors;
    args.x_grad = little.y;
    args.factors_grad = little.more;
    permutation::unpermute_gradient(args, Parallel());
  }
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

constexpr char kBytes[] = "It copies bytes, with one loop for all instruction sets";
const Handlers<MakeRowMapCall, nullptr, MakeMap> kMakeMap(kBytes);
const Handlers<PermuteCall, nullptr, Permute> kPermute(kBytes);
const Handlers<UnpermuteCall, WarmUnpermute, Unpermute> kUnpermute;
const Handlers<UnpermuteGradientCall, WarmGradient, Gradient> kGradient;

}  // namespace
}  // namespace jaxtap::ffi
