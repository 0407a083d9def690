#include "cuda/kernels/grouped.h"

namespace jaxtap::cuda {
namespace {

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
    grouped_absmax(args, stream);
    grouped_values(args, stream);
    quantize_scales(all, stream);
  } else {
    grouped_values(args, stream);
  }
  grouped_rest(args, stream);
}

}  // namespace jaxtap::cuda
