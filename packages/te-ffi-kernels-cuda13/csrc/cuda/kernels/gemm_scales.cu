// The scales of a matmul, as cuBLASLt takes them.
#include <limits>

#include "cuda/device.h"
#include "cuda/kernels/gemm.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 128;

struct Args {
  GemmScales given;
  int64_t lanes, tiles_across;  // padded lanes; tiles along the blocks
};

// A thread has the four scales of a lane in a tile, which are beside each other in the result.
__global__ void gemm_scales_kernel(Args args) {
  const GemmScales& given = args.given;
  const int64_t at = thread_number();
  if (at >= args.lanes * args.tiles_across) return;
  // Lanes are fastest: they are beside each other where blocks come first.
  const int64_t lane = at % args.lanes, across = at / args.lanes;
  uint32_t four = 0;
  JAXTAP_UNROLL
  for (int i = 0; i < kScaleBlocks; ++i) {
    const int64_t block = across * kScaleBlocks + i;
    if (lane < given.lanes && block < given.blocks) {
      const int64_t from =
          given.k_is_last ? lane * given.blocks + block : block * given.lanes + lane;
      four |= static_cast<uint32_t>(given.scales[from]) << (8 * i);
    }
  }
  const int64_t tile = lane / kScaleLanes * args.tiles_across + across;
  const int64_t in_tile = lane % kScaleLanes;
  auto* out = reinterpret_cast<uint32_t*>(given.out);
  out[tile * kScaleLanes + in_tile % 32 * 4 + in_tile / 32] = four;
}

__global__ void gemm_factors_kernel(GemmFactors args) {
  const float scale = args.lhs_scale == nullptr ? 1.0f : *args.lhs_scale * *args.rhs_scale;
  args.out[0] =
      *args.beta == 0.0f ? *args.alpha * scale : std::numeric_limits<float>::quiet_NaN();
  args.out[1] = 0.0f;
}

}  // namespace

void gemm_scales(const GemmScales& given, Stream stream) {
  const Args args = {given, ceil_of(given.lanes, kScaleLanes) * kScaleLanes,
                     ceil_of(given.blocks, kScaleBlocks)};
  launch(gemm_scales_kernel, ceil_of(args.lanes * args.tiles_across, kThreads), kThreads, stream,
         args);
}

void gemm_factors(const GemmFactors& args, Stream stream) {
  launch(gemm_factors_kernel, 1, 1, stream, args);
}

}  // namespace jaxtap::cuda
