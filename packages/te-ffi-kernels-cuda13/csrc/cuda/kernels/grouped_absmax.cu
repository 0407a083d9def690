#include "cuda/kernels/grouped_tile.h"
#include "cuda/kernels/quantize_absmax.h"

namespace jaxtap::cuda {
namespace {

template <class Source>
__global__ void grouped_absmax_kernel(GroupedTiles<Source> args) {
  in_group(args, [](const TilesOf<Source>& of_group, const Place& place) {
    absmax_of_tile(of_group, place);
  });
}

}  // namespace

void grouped_absmax(const GroupedQuantize& given, Stream stream) {
  of_groups(given, [&](const auto& source) {
    using Source = std::decay_t<decltype(source)>;
    const auto args = grouped_args(given, source);
    launch(grouped_absmax_kernel<Source>, grouped_blocks(args), kTileThreads, stream, args);
  });
}

}  // namespace jaxtap::cuda
