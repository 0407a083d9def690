// Matmuls with packed weights where x is int8.
#include "cuda/kernels/packed_mma.h"

namespace jaxtap::cuda {

void packed_mma_int8(const PackedMma& args, Stream stream) { run_mma<Int8Values>(args, stream); }

}  // namespace jaxtap::cuda
