// What of cuBLASLt the handlers use, as an interface, so that tests can put one in its place that
// computes on the CPU, counts calls and fails. Needs no header of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/runtime.h"

// As cuBLASLt's header names them.
struct cublasLtContext;

namespace jaxtap::cuda {

using LtHandle = cublasLtContext*;
// Opaque, as all of cuBLASLt's descriptors.
struct LtMatmulTag;
struct LtLayoutTag;
struct LtPreferenceTag;
using LtMatmul = LtMatmulTag*;
using LtLayout = LtLayoutTag*;
using LtPreference = LtPreferenceTag*;

// A way to compute a matmul, which fits one matmul on one kind of device.
struct LtAlgorithm {
  uint64_t data[8];
};

enum class LtType { kF32, kBF16, kF16, kE4M3, kE5M2, kS8, kS32 };
enum class LtSums { kF32, kS32 };  // also what alpha and beta are

// What a matmul has beside its layouts.
enum class LtNumber {
  kTurnA,            // whether A is transposed
  kTurnB,            // whether B is
  kFactorsOnDevice,  // whether alpha and beta are pointers to the device's memory
  kAddsBias,         // whether a bias is added, one number for each row of the result
  kBiasType,         // an LtType
  kFastSums,         // whether sums of float8 may lose digits
  kBlocksOfA,        // whether A has scales of MX blocks
  kBlocksOfB,        // whether B has
};
enum class LtPointer { kBias, kScalesOfA, kScalesOfB };

// A matmul's operands for one call. Matrices are column by column.
struct LtCall {
  LtMatmul matmul = nullptr;
  const void* alpha = nullptr;
  const void* a = nullptr;
  LtLayout a_layout = nullptr;
  const void* b = nullptr;
  LtLayout b_layout = nullptr;
  const void* beta = nullptr;
  void* out = nullptr;
  LtLayout out_layout = nullptr;
};

// cuBLAS's statuses.
class CublasLt : public Library {
 public:
  virtual int create(LtHandle* handle) = 0;
  virtual int destroy(LtHandle handle) = 0;
  virtual int create_matmul(LtMatmul* matmul, LtSums sums) = 0;
  virtual int destroy_matmul(LtMatmul matmul) = 0;
  virtual int set_number(LtMatmul matmul, LtNumber which, int32_t value) = 0;
  virtual int set_pointer(LtMatmul matmul, LtPointer which, const void* value) = 0;
  virtual int create_layout(LtLayout* layout, LtType type, int64_t rows, int64_t cols,
                            int64_t stride) = 0;
  virtual int destroy_layout(LtLayout layout) = 0;
  virtual int create_preference(LtPreference* preference) = 0;
  virtual int destroy_preference(LtPreference preference) = 0;
  virtual int limit_workspace(LtPreference preference, size_t bytes) = 0;
  // Addresses of matrices are multiples of this.
  virtual int set_alignment(LtPreference preference, uint32_t bytes) = 0;
  // The algorithm that cuBLASLt takes for the fastest, and the workspace that it needs. `found` is
  // false where there is none.
  virtual int choose(LtHandle handle, const LtCall& call, LtPreference preference,
                     LtAlgorithm* algorithm, size_t* workspace, bool* found) = 0;
  virtual int multiply(LtHandle handle, const LtCall& call, const LtAlgorithm& algorithm,
                       void* workspace, size_t bytes, Stream stream) = 0;
};

// NVIDIA's, or a test's. Throws where NVIDIA's isn't loaded.
CublasLt& cublaslt();

// Loads the shared library at `path`, or of that name, unless one is loaded. Returns its version,
// as 130100 for 13.1.0, or 0 with `error` set.
size_t load_cublaslt(const std::string& path, std::string* error);

using OwnedHandle = Owned<&CublasLt::destroy>;
using OwnedMatmul = Owned<&CublasLt::destroy_matmul>;
using OwnedLayout = Owned<&CublasLt::destroy_layout>;
using OwnedPreference = Owned<&CublasLt::destroy_preference>;

}  // namespace jaxtap::cuda
