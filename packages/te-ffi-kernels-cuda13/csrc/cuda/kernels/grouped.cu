// Quantization of groups of rows.
#include "cuda/kernels/grouped_tile.h"
#include "cuda/kernels/quantize_absmax.h"
#include "cuda/kernels/quantize_values.h"

namespace jaxtap::cuda {
namespace {

template <class Source>
__global__ void grouped_absmax_kernel(GroupedTiles<Source> args) {
  in_group(args, [](const TilesOf<Source>& of_group, const Place& place) {
    absmax_of_tile(of_group, place);
  });
}

void absmax_of_groups(const GroupedQuantize& given, Stream stream) {
  of_groups(given, [&](const auto& source) {
    using Source = std::decay_t<decltype(source)>;
    const auto args = grouped_args(given, source);
    launch(grouped_absmax_kernel<Source>, grouped_blocks(args), kTileThreads, stream, args);
  });
}

template <class Source, Kind kKind>
__global__ void grouped_values_kernel(GroupedTiles<Source> args) {
  in_group(args, [](const TilesOf<Source>& of_group, const Place& place) {
    encode_tile<kKind>(of_group, place);
  });
}

void values_of_groups(const GroupedQuantize& given, Stream stream) {
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

void find_starts(const GroupedQuantize& given, Stream stream) {
  GroupSizes sizes;
  sizes.sizes = given.sizes;
  sizes.groups = given.groups;
  sizes.length = given.length;
  sizes.rows_each = given.rows_each;
  const bool blocks = given.scaling == te::Scaling::kMx && given.colwise != nullptr;
  sizes.unit = blocks ? te::kBlock : 1;
  sizes.tile = kGroupTile;
  if (te::is_tensor(given.scaling)) {
    sizes.scale = given.scale;
    sizes.scales = static_cast<float*>(given.scales);
    sizes.colwise_scales = static_cast<float*>(given.colwise_scales);
  }
  sizes.zeros = given.absmax;
  find_group_starts(sizes, given.starts, stream);
}

}  // namespace

void grouped_quantize(const GroupedQuantize& args, Stream stream) {
  find_starts(args, stream);
  if (args.scaling == te::Scaling::kChannel) {
    Quantize all;
    all.rows = args.rows();
    all.cols = args.groups * args.cols;
    all.qtype = args.qtype;
    all.scales = args.scales;
    all.colwise_scales = args.colwise_scales;
    quantize_clear(all.scales, all.rows, stream);
    quantize_clear(all.colwise_scales, all.cols, stream);
    absmax_of_groups(args, stream);
    values_of_groups(args, stream);
    quantize_scales(all, stream);
  } else {
    values_of_groups(args, stream);
  }
  grouped_rest(args, stream);
}

}  // namespace jaxtap::cuda
