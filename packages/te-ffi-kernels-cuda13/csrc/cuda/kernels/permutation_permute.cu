// Tokens to rows. A block has a token, whose numbers it reads once for each of its rows.
#include "cuda/kernels/permutation_token.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 128;

// kBytes at once, as many as rows are aligned to.
template <int kBytes>
__global__ void __launch_bounds__(kThreads) permute_kernel(Permute args) {
  using Part = Vector<uint16_t, kBytes / 2>;
  const int64_t token = blockIdx.x, parts = args.row_bytes / kBytes;
  const auto* from = static_cast<const Part*>(args.x) + token * parts;
  each_row(args.map, token, [&](int64_t row, int64_t expert) {
    auto* to = static_cast<Part*>(args.out) + row * parts;
    for (int64_t i = threadIdx.x; i < parts; i += kThreads) to[i] = from[i];
    if (args.probs != nullptr && threadIdx.x == 0) {
      copy_number(args.probs, token * args.map.experts + expert, args.permuted_probs, row,
                  args.prob_bytes);
    }
  });
}

}  // namespace

void permute(const Permute& args, Stream stream) {
  const bool wide = args.row_bytes % 16 == 0 && aligned(16, static_cast<const char*>(args.x),
                                                        static_cast<const char*>(args.out));
  launch(wide ? permute_kernel<16> : permute_kernel<2>, args.map.tokens, kThreads, stream, args);
}

}  // namespace jaxtap::cuda
