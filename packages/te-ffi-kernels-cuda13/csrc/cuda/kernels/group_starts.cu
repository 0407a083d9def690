// One block, for all groups.
#include "cuda/device.h"
#include "cuda/kernels/group_starts.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;

struct Args : GroupSizes {
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

__global__ void group_starts_kernel(Args args) {
  __shared__ int64_t sizes[kThreads], tiles[kThreads];
  __shared__ int wrong;
  if (threadIdx.x == 0) wrong = 0;
  int64_t size_before = 0, tiles_before = 0;  // of groups that earlier rounds had
  for (int64_t base = 0; base < args.groups; base += kThreads) {
    const int64_t group = base + threadIdx.x;
    const int64_t size = group < args.groups ? args.sizes[group] : 0;
    const int64_t here = size < 0 ? 0 : size < args.length ? size : args.length;
    const int64_t rows = here * args.rows_each;
    const int64_t tiles_here = (rows + args.tile - 1) / args.tile;
    __syncthreads();
    if (size < 0 || rows % args.unit != 0) atomicMax(&wrong, 1);
    sizes[threadIdx.x] = size;
    tiles[threadIdx.x] = tiles_here;
    add_up(sizes);
    add_up(tiles);
    if (group < args.groups) {
      const int64_t row = (size_before + sizes[threadIdx.x] - size) * args.rows_each;
      args.starts[group] = {row, tiles_before + tiles[threadIdx.x] - tiles_here};
      if (args.zeros != nullptr) args.zeros[group] = 0.0f;
      if (args.scale != nullptr) {
        const float inverse = 1.0f / args.scale[group];
        if (args.scales != nullptr) args.scales[group] = inverse;
        if (args.colwise_scales != nullptr) args.colwise_scales[group] = inverse;
      }
    }
    size_before += sizes[kThreads - 1];
    tiles_before += tiles[kThreads - 1];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool good = wrong == 0 && (args.may_exceed || size_before <= args.length);
  args.starts[args.groups] = {good ? size_before * args.rows_each : kNoRow, good ? tiles_before : 0};
}

}  // namespace

void find_group_starts(const GroupSizes& sizes, GroupStart* starts, Stream stream) {
  launch(group_starts_kernel, 1, kThreads, stream, Args{sizes, starts});
}

}  // namespace jaxtap::cuda
