// A thread has the four scales of a lane in a tile, which are beside each other in the result.
#include "cuda/device.h"
#include "cuda/kernels/gemm.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 128;

struct Args {
  GemmScales given;
  int64_t lanes, tiles_across;  // padded lanes; tiles along the blocks
};

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

}  // namespace

void gemm_scales(const GemmScales& given, Stream stream) {
  const Args args = {given, ceil_of(given.lanes, kScaleLanes) * kScaleLanes,
                     ceil_of(given.blocks, kScaleBlocks)};
  launch(gemm_scales_kernel, ceil_of(args.lanes * args.tiles_across, kThreads), kThreads, stream,
         args);
}

}  // namespace jaxtap::cuda
