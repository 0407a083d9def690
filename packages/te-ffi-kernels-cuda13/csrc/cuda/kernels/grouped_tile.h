// Tiles of groups: as those of a matrix, which a group is once its block has found it. There are
// blocks for as many tiles as groups can have; those that are left over end.
#pragma once

#include <type_traits>

#include "cuda/kernels/group_of.h"
#include "cuda/kernels/grouped.h"
#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

static_assert(kTile == kGroupTile, "groups are divided into the tiles of a matrix");

template <class Source>
struct GroupedTiles : TilesOf<Source> {
  const GroupStart* starts;
  int64_t groups;
  te::Scaling scaling;
};

template <class Source>
GroupedTiles<Source> grouped_args(const GroupedQuantize& given, const Source& source) {
  Quantize all;
  all.rows = given.rows();
  all.cols = given.cols;
  all.qtype = given.qtype;
  all.scaling = given.scaling;
  all.scale = given.scale;
  all.qvalues = given.qvalues;
  all.colwise = given.colwise;
  all.scales = given.scales;
  all.colwise_scales = given.colwise_scales;
  all.updated_amax = te::is_tensor(given.scaling) ? given.absmax : nullptr;
  GroupedTiles<Source> args = {};
  static_cast<TilesOf<Source>&>(args) = tile_args(all, source);
  args.starts = given.starts;
  args.groups = given.groups;
  args.scaling = given.scaling;
  return args;
}

template <class Source>
int64_t grouped_blocks(const GroupedTiles<Source>& args) {
  return (args.rows / kTile + args.groups) * args.tiles_across;
}

// Of results that may not be wanted.
template <typename T>
JAXTAP_DEVICE T* moved(void* array, int64_t by) {
  return array == nullptr ? nullptr : static_cast<T*>(array) + by;
}

// Calls body(arguments, place) for the group that has the block's tile, if there is one.
template <class Source, class Body>
JAXTAP_DEVICE void in_group(const GroupedTiles<Source>& all, Body&& body) {
  const int64_t tile = blockIdx.x / all.tiles_across;
  if (tile >= all.starts[all.groups].tile) return;
  const int64_t group = group_of(all.starts, all.groups, tile);
  const GroupStart start = all.starts[group];
  TilesOf<Source> args = all;
  args.rows = all.starts[group + 1].row - start.row;
  const int64_t at = start.row * all.cols;
  args.source.x += at;
  args.qvalues = moved<uint8_t>(all.qvalues, at);
  args.colwise = moved<uint8_t>(all.colwise, at);
  args.wide_turned = (te::turns(all.scaling) ? args.rows : args.cols) % kPart == 0 &&
                     reinterpret_cast<uintptr_t>(args.colwise) % kPart == 0;
  if (all.scaling == te::Scaling::kMx) {
    args.scales = moved<uint8_t>(all.scales, at / te::kBlock);
    args.colwise_scales = moved<uint8_t>(all.colwise_scales, at / te::kBlock);
  } else if (all.scaling == te::Scaling::kChannel) {
    args.scales = moved<float>(all.scales, start.row);
    args.colwise_scales = moved<float>(all.colwise_scales, group * all.cols);
  } else {
    args.scale += group;
    args.absmax += group;
  }
  body(args, Place::of(args, blockIdx.x - start.tile * all.tiles_across));
}

// Calls run(source) for the numbers of x.
template <class Run>
void of_groups(const GroupedQuantize& given, Run&& run) {
  Quantize array;
  array.x = given.x;
  array.dtype = given.dtype;
  of_array(array, run);
}

}  // namespace
}  // namespace jaxtap::cuda
