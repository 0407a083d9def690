// Matmuls with packed weights where x is float32.
#include "cuda/kernels/packed_mma.h"

namespace jaxtap::cuda {

void packed_mma_f32(const PackedMma& args, Stream stream) { run_mma<F32>(args, stream); }

}  // namespace jaxtap::cuda
