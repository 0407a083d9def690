// What results are where the sizes of groups can't be.
#include "cuda/kernels/grouped.h"
#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256, kBlocksMost = 256;

struct Args {
  const GroupStart* end;
  uint8_t* results[5];
  int64_t bytes[5];
};

__global__ void grouped_refuse_kernel(Args args) {
  if (args.end->row != kNoRow) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int i = 0; i < 5; ++i) {
    for (int64_t at = thread_number(); at < args.bytes[i]; at += step) args.results[i][at] = 0xff;
  }
}

}  // namespace

void grouped_refuse(const GroupedQuantize& given, Stream stream) {
  const int64_t rows = given.rows(), size = rows * given.cols;
  const auto scales = [&](int64_t slices) {
    if (given.scaling == te::Scaling::kMx) return size / te::kBlock;
    return 4 * (given.scaling == te::Scaling::kChannel ? slices : given.groups);
  };
  Args args = {given.starts + given.groups,
               {given.codes, given.turned, static_cast<uint8_t*>(given.scales),
                static_cast<uint8_t*>(given.turned_scales),
                reinterpret_cast<uint8_t*>(given.absmax)},
               {size, size, scales(rows), scales(given.groups * given.cols), 4 * given.groups}};
  for (int i = 0; i < 5; ++i) {
    if (args.results[i] == nullptr) args.bytes[i] = 0;
  }
  const int64_t blocks = ceil_of(size, kThreads);
  launch(grouped_refuse_kernel, blocks < 1 ? 1 : blocks < kBlocksMost ? blocks : kBlocksMost,
         kThreads, stream, args);
}

}  // namespace jaxtap::cuda
