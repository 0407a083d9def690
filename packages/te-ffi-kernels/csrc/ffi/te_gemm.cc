// Handlers of gemm_v2.

#include <vector>

#include "ffi/call.h"
#include "ffi/te_gemm_call.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

void Warm(const GemmConfig& config) {
  constexpr int64_t kSide = te::kTile;
  std::vector<float> numbers(kSide * kSide, 1.0f), out(kSide * kSide), scales(kSide, 1.0f);
  te::Gemm args;
  args.m = args.n = args.k = kSide;
  const bool quantized = config.scaling != Scaling::kNone;
  for (te::Factor* factor : {&args.lhs, &args.rhs}) {
    factor->data = numbers.data();
    factor->dtype = quantized ? DType::F8E4M3FN : DType::F32;
    factor->scales = quantized ? scales.data() : nullptr;
  }
  args.scaling = config.scaling;
  args.lhs.lanes_first = !config.lhs_transposed;
  args.rhs.lanes_first = config.rhs_transposed;
  args.out = out.data();
  args.gelu = config.gelu;
  te::gemm(args, Parallel());
}

float Number(const Array& array) { return *static_cast<const float*>(array.data); }

void Multiply(const GemmCall& given, const Parallel& parallel) {
  const float beta = Number(given.beta);
  if (beta != 0.0f) {
    throw invalid_argument("beta must be 0, got ", beta, ". The result has no value before.");
  }
  te::Gemm args = given.args;
  args.alpha = Number(given.alpha);
  te::gemm(args, parallel);
}

const Handlers<GemmCall, Warm, Multiply> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
