#include "cuda/kernels/grouped_tile.h"
#include "cuda/kernels/quantize_values.h"

namespace jaxtap::cuda {
namespace {

template <class Source, Kind kKind>
__global__ void grouped_values_kernel(GroupedTiles<Source> args) {
  in_group(args, [](const TilesOf<Source>& of_group, const Place& place) {
    encode_tile<kKind>(of_group, place);
  });
}

}  // namespace

void grouped_values(const GroupedQuantize& given, Stream stream) {
  of_groups(given, [&](const auto& source) {
    using Source = std::decay_t<decltype(source)>;
    const auto args = grouped_args(given, source);
    const auto with = [&](auto kernel) {
      launch(kernel, grouped_blocks(args), kTileThreads, stream, args);
    };
    if (te::is_tensor(given.scaling)) {
      with(grouped_values_kernel<Source, Kind::kTensor>);
    } else if (given.scaling == te::Scaling::kChannel) {
      with(grouped_values_kernel<Source, Kind::kChannel>);
    } else {
      with(grouped_values_kernel<Source, Kind::kMx>);
    }
  });
}

}  // namespace jaxtap::cuda
