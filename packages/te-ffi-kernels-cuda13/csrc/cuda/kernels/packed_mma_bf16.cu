// Matmuls with packed weights where x is bfloat16.
#include "cuda/kernels/packed_mma.h"

namespace jaxtap::cuda {

void packed_mma_bf16(const PackedMma& args, Stream stream) { run_mma<BF16>(args, stream); }

}  // namespace jaxtap::cuda
