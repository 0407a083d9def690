// Matmuls with packed weights where x is float16.
#include "cuda/kernels/packed_mma.h"

namespace jaxtap::cuda {

void packed_mma_f16(const PackedMma& args, Stream stream) { run_mma<F16>(args, stream); }

}  // namespace jaxtap::cuda
