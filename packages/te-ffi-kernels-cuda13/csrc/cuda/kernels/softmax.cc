#include "cuda/kernels/softmax.h"

namespace jaxtap::cuda {

void softmax_forward(const SoftmaxForward& args, Stream stream) {
  const bool short_rows = args.shape.k <= kSoftmaxOfWarp;
  (short_rows ? softmax_forward_of_warps : softmax_forward_of_blocks)(args, stream);
}

void softmax_backward(const SoftmaxBackward& args, Stream stream) {
  const bool short_rows = args.shape.k <= kSoftmaxOfWarp;
  (short_rows ? softmax_backward_of_warps : softmax_backward_of_blocks)(args, stream);
}

}  // namespace jaxtap::cuda
