// The scales of rows and columns in place of the bits of their largest magnitudes.
#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;

struct Args {
  float* scales;
  int64_t count;
  QType qtype;
};

__global__ void quantize_scales_kernel(Args args) {
  const int64_t at = thread_number();
  if (at >= args.count) return;
  const int absmax = reinterpret_cast<const int*>(args.scales)[at];
  args.scales[at] = 1.0f / channel_scale(absmax, args.qtype);
}

void run(void* scales, int64_t count, QType qtype, Stream stream) {
  if (scales == nullptr) return;
  launch(quantize_scales_kernel, ceil_of(count, kThreads), kThreads, stream,
         Args{static_cast<float*>(scales), count, qtype});
}

}  // namespace

void quantize_scales(const Quantize& args, Stream stream) {
  run(args.scales, args.rows, args.qtype, stream);
  run(args.colwise_scales, args.cols, args.qtype, stream);
}

}  // namespace jaxtap::cuda
