#include "cuda/kernels/grouped.h"

namespace jaxtap::cuda {

void grouped_quantize(const GroupedQuantize& args, Stream stream) {
  grouped_starts(args, stream);
  if (args.scaling == te::Scaling::kChannel) {
    Quantize all;
    all.rows = args.rows();
    all.cols = args.groups * args.cols;
    all.qtype = args.qtype;
    all.scales = args.scales;
    all.turned_scales = args.turned_scales;
    quantize_clear(all.scales, all.rows, stream);
    quantize_clear(all.turned_scales, all.cols, stream);
    grouped_absmax(args, stream);
    grouped_values(args, stream);
    quantize_scales(all, stream);
  } else {
    grouped_values(args, stream);
  }
  grouped_rest(args, stream);
}

}  // namespace jaxtap::cuda
