// What results are where no group is, and where the sizes of groups can't be.
#include "cuda/kernels/grouped.h"
#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256, kBlocksMost = 256;

struct Args {
  const GroupStart* end;
  uint8_t* results[5];
  int64_t bytes[5];
  int64_t row_blocks[5];  // bytes that 32 rows have, of results that have rows
};

__global__ void grouped_rest_kernel(Args args) {
  const int64_t end = args.end->row;
  const bool good = end != kNoRow;
  const uint8_t filler = good ? 0 : 0xff;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int i = 0; i < 5; ++i) {
    if (good && args.row_blocks[i] == 0) continue;
    const int64_t begin = good ? end * args.row_blocks[i] / te::kBlock : 0;
    for (int64_t at = begin + thread_number(); at < args.bytes[i]; at += step) {
      args.results[i][at] = filler;
    }
  }
}

}  // namespace

void grouped_rest(const GroupedQuantize& given, Stream stream) {
  const int64_t rows = given.rows(), size = rows * given.cols;
  const auto scales = [&](int64_t slices) {
    if (given.scaling == te::Scaling::kMx) return size / te::kBlock;
    return 4 * (given.scaling == te::Scaling::kChannel ? slices : given.groups);
  };
  Args args = {given.starts + given.groups,
               {given.qvalues, given.colwise, static_cast<uint8_t*>(given.scales),
                static_cast<uint8_t*>(given.colwise_scales),
                reinterpret_cast<uint8_t*>(given.absmax)},
               {size, size, scales(rows), scales(given.groups * given.cols), 4 * given.groups},
               {}};
  const bool mx = given.scaling == te::Scaling::kMx;
  const int64_t of_row = given.scaling == te::Scaling::kChannel ? 4 * te::kBlock : 0;
  args.row_blocks[0] = args.row_blocks[1] = te::kBlock * given.cols;
  args.row_blocks[2] = mx ? given.cols : of_row;
  args.row_blocks[3] = mx ? given.cols : 0;
  for (int i = 0; i < 5; ++i) {
    if (args.results[i] == nullptr) args.bytes[i] = 0;
  }
  const int64_t blocks = ceil_of(size, kThreads);
  launch(grouped_rest_kernel, blocks < 1 ? 1 : blocks < kBlocksMost ? blocks : kBlocksMost,
         kThreads, stream, args);
}

}  // namespace jaxtap::cuda
