#include "cuda/gemm/steps.h"

#include "cuda/kernels/gemm.h"

namespace jaxtap::cuda {
namespace {

bool is_half(te::Float dtype) { return dtype != te::Float::kF32; }

}  // namespace

GemmWorkspace::GemmWorkspace(const te::Gemm& args, bool has_bias) {
  quantized = args.scaling != te::Scaling::kNone;
  exact = args.lhs.dtype == DType::S8;
  mx = args.scaling == te::Scaling::kMx;
  depth = quantized ? up_to(args.k, kQuantizedSide) : args.k;
  rows = exact ? up_to(args.m, kInt8Rows) : args.m;
  cols = quantized ? up_to(args.n, kQuantizedSide) : args.n;
  arranges_lhs = quantized && (!args.lhs.k_is_last || depth != args.k || rows != args.m);
  arranges_rhs = quantized && (!args.rhs.k_is_last || depth != args.k || cols != args.n);

  // Floats of 16 bits become floats of their own kind, or float32.
  const bool other =
      !quantized && is_half(args.out_dtype) && te::float_of(args.lhs.dtype) != args.out_dtype;
  const bool plain = !exact && !other && cols == args.n &&
                     args.scaling != te::Scaling::kChannel && !args.gelu;
  adds_bias = has_bias && plain && args.n % 8 == 0 && args.k % 8 == 0 &&
              (!quantized || is_half(args.out_dtype));
  finishes = !plain || (has_bias && !adds_bias);
  keeps_sums = finishes && (is_half(args.out_dtype) || cols != args.n || rows != args.m);

  const auto part = [&](bool wanted, int64_t size) { return take_part(bytes, wanted, size); };
  const int64_t scales = up_to(args.k / te::kBlock, kScaleBlocks);
  factors = part(!finishes, 2 * sizeof(float));
  lhs = part(arranges_lhs, rows * depth);
  rhs = part(arranges_rhs, cols * depth);
  lhs_scales = part(mx, up_to(args.m, kScaleLanes) * scales);
  rhs_scales = part(mx, up_to(cols, kScaleLanes) * scales);
  sums = part(keeps_sums, rows * cols * static_cast<int64_t>(sizeof(float)));
}

}  // namespace jaxtap::cuda
