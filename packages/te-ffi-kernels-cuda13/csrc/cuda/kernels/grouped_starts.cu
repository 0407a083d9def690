// Where groups begin, and those results that are numbers of theirs. One block, for all groups.
#include "cuda/kernels/grouped.h"
#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;

struct Args {
  const int32_t* sizes;
  int64_t groups, length, rows_each;
  int64_t unit;  // of which groups must have a multiple of rows
  const float* scale;
  float *scales, *turned_scales, *absmax;
  GroupStart* starts;
};

// In place, the sums of the numbers up to each thread's.
JAXTAP_DEVICE void add_up(int64_t (&numbers)[kThreads]) {
  for (int step = 1; step < kThreads; step *= 2) {
    const int mine = threadIdx.x;
    __syncthreads();
    const int64_t before = mine >= step ? numbers[mine - step] : 0;
    __syncthreads();
    numbers[mine] += before;
  }
  __syncthreads();
}

__global__ void grouped_starts_kernel(Args args) {
  __shared__ int64_t sizes[kThreads], tiles[kThreads];
  __shared__ int wrong;
  if (threadIdx.x == 0) wrong = 0;
  int64_t size_before = 0, tiles_before = 0;  // of groups that earlier rounds had
  for (int64_t base = 0; base < args.groups; base += kThreads) {
    const int64_t group = base + threadIdx.x;
    const int64_t size = group < args.groups ? args.sizes[group] : 0;
    const int64_t rows = size < 0 || size > args.length ? 0 : size * args.rows_each;
    const int64_t tiles_here = (rows + kTile - 1) / kTile;
    __syncthreads();
    if (size < 0 || rows % args.unit != 0) atomicMax(&wrong, 1);
    sizes[threadIdx.x] = size;
    tiles[threadIdx.x] = tiles_here;
    add_up(sizes);
    add_up(tiles);
    if (group < args.groups) {
      const int64_t row = (size_before + sizes[threadIdx.x]) * args.rows_each - rows;
      args.starts[group] = {row, tiles_before + tiles[threadIdx.x] - tiles_here};
      args.absmax[group] = 0.0f;
      if (args.scale != nullptr) {
        const float inverse = 1.0f / args.scale[group];
        if (args.scales != nullptr) args.scales[group] = inverse;
        if (args.turned_scales != nullptr) args.turned_scales[group] = inverse;
      }
    }
    size_before += sizes[kThreads - 1];
    tiles_before += tiles[kThreads - 1];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool good = wrong == 0 && size_before <= args.length;
  args.starts[args.groups] = {good ? size_before * args.rows_each : kNoRow, good ? tiles_before : 0};
}

}  // namespace

void grouped_starts(const GroupedQuantize& given, Stream stream) {
  Args args = {};
  args.sizes = given.sizes;
  args.groups = given.groups;
  args.length = given.length;
  args.rows_each = given.rows_each;
  const bool blocks = given.scaling == te::Scaling::kMx && given.turned != nullptr;
  args.unit = blocks ? te::kBlock : 1;
  if (te::is_tensor(given.scaling)) {
    args.scale = given.scale;
    args.scales = static_cast<float*>(given.scales);
    args.turned_scales = static_cast<float*>(given.turned_scales);
  }
  args.absmax = given.absmax;
  args.starts = given.starts;
  launch(grouped_starts_kernel, 1, kThreads, stream, args);
}

}  // namespace jaxtap::cuda
