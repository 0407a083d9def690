// cuBLASLt, from the shared library that JAX's CUDA plugin uses, which is opened when a matmul is
// first asked for: a machine without it can load this.
#include "cuda/cublaslt.h"

#include <cublasLt.h>

#include <mutex>

#include "common/error.h"
#include "cuda/library.h"

#define JAXTAP_CUBLASLT(one)                                                                      \
  one(cublasLtGetVersion) one(cublasLtGetStatusString) one(cublasLtCreate) one(cublasLtDestroy)   \
  one(cublasLtMatmulDescCreate) one(cublasLtMatmulDescDestroy) one(cublasLtMatmulDescSetAttribute)\
  one(cublasLtMatrixLayoutCreate) one(cublasLtMatrixLayoutDestroy)                                \
  one(cublasLtMatmulPreferenceCreate) one(cublasLtMatmulPreferenceDestroy)                        \
  one(cublasLtMatmulPreferenceSetAttribute) one(cublasLtMatmulAlgoGetHeuristic)                   \
  one(cublasLtMatmul)

namespace jaxtap::cuda {
namespace {

static_assert(sizeof(LtAlgorithm) == sizeof(cublasLtMatmulAlgo_t), "one is passed as the other");

JAXTAP_DEFINE_FUNCTIONS(JAXTAP_CUBLASLT)

cudaDataType_t of(LtType type) {
  switch (type) {
    case LtType::kF32: return CUDA_R_32F;
    case LtType::kBF16: return CUDA_R_16BF;
    case LtType::kF16: return CUDA_R_16F;
    case LtType::kE4M3: return CUDA_R_8F_E4M3;
    case LtType::kE5M2: return CUDA_R_8F_E5M2;
    case LtType::kS8: return CUDA_R_8I;
    case LtType::kS32: return CUDA_R_32I;
  }
  throw invalid_argument("unknown type ", static_cast<int>(type));
}

cublasLtMatmulDesc_t of(LtMatmul matmul) {
  return reinterpret_cast<cublasLtMatmulDesc_t>(matmul);
}
cublasLtMatrixLayout_t of(LtLayout layout) {
  return reinterpret_cast<cublasLtMatrixLayout_t>(layout);
}
cublasLtMatmulPreference_t of(LtPreference preference) {
  return reinterpret_cast<cublasLtMatmulPreference_t>(preference);
}
template <typename To, typename From>
To* as(From* place) {
  return reinterpret_cast<To*>(place);
}

class Loaded : public CublasLt {
 public:
  explicit Loaded(const Functions& functions) : lt_(functions) {}

  size_t version() const { return lt_.cublasLtGetVersion(); }

  int create(LtHandle* handle) override { return lt_.cublasLtCreate(handle); }
  int destroy(LtHandle handle) override { return lt_.cublasLtDestroy(handle); }
  int create_matmul(LtMatmul* matmul, LtSums sums) override {
    const bool exact = sums == LtSums::kS32;
    return lt_.cublasLtMatmulDescCreate(as<cublasLtMatmulDesc_t>(matmul),
                              exact ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F,
                              exact ? CUDA_R_32I : CUDA_R_32F);
  }
  int destroy_matmul(LtMatmul matmul) override { return lt_.cublasLtMatmulDescDestroy(of(matmul)); }
  int set_number(LtMatmul matmul, LtNumber which, int32_t value) override {
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto number) {
      return static_cast<int>(
          lt_.cublasLtMatmulDescSetAttribute(of(matmul), attribute, &number, sizeof number));
    };
    const bool yes = value != 0;
    const auto turn = static_cast<int32_t>(yes ? CUBLAS_OP_T : CUBLAS_OP_N);
    const auto blocks = static_cast<int32_t>(yes ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0
                                                 : CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
    switch (which) {
      case LtNumber::kTurnA: return set(CUBLASLT_MATMUL_DESC_TRANSA, turn);
      case LtNumber::kTurnB: return set(CUBLASLT_MATMUL_DESC_TRANSB, turn);
      case LtNumber::kFactorsOnDevice:
        return set(CUBLASLT_MATMUL_DESC_POINTER_MODE,
                   static_cast<int32_t>(yes ? CUBLASLT_POINTER_MODE_DEVICE
                                            : CUBLASLT_POINTER_MODE_HOST));
      case LtNumber::kAddsBias:
        return set(CUBLASLT_MATMUL_DESC_EPILOGUE,
                   static_cast<uint32_t>(yes ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT));
      case LtNumber::kBiasType:
        return set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                   static_cast<int32_t>(of(static_cast<LtType>(value))));
      case LtNumber::kFastSums:
        return set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(yes));
      case LtNumber::kBlocksOfA: return set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, blocks);
      case LtNumber::kBlocksOfB: return set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, blocks);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  int set_pointer(LtMatmul matmul, LtPointer which, const void* value) override {
    const auto attribute = which == LtPointer::kBias        ? CUBLASLT_MATMUL_DESC_BIAS_POINTER
                           : which == LtPointer::kScalesOfA ? CUBLASLT_MATMUL_DESC_A_SCALE_POINTER
                                                            : CUBLASLT_MATMUL_DESC_B_SCALE_POINTER;
    return lt_.cublasLtMatmulDescSetAttribute(of(matmul), attribute, &value, sizeof value);
  }
  int create_layout(LtLayout* layout, LtType type, int64_t rows, int64_t cols,
                    int64_t stride) override {
    return lt_.cublasLtMatrixLayoutCreate(as<cublasLtMatrixLayout_t>(layout), of(type),
                             static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), stride);
  }
  int destroy_layout(LtLayout layout) override {
    return lt_.cublasLtMatrixLayoutDestroy(of(layout));
  }
  int create_preference(LtPreference* preference) override {
    return lt_.cublasLtMatmulPreferenceCreate(as<cublasLtMatmulPreference_t>(preference));
  }
  int destroy_preference(LtPreference preference) override {
    return lt_.cublasLtMatmulPreferenceDestroy(of(preference));
  }
  int limit_workspace(LtPreference preference, size_t bytes) override {
    const uint64_t most = bytes;
    return lt_.cublasLtMatmulPreferenceSetAttribute(
        of(preference), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
  }
  int set_alignment(LtPreference preference, uint32_t bytes) override {
    for (auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      const int status = lt_.cublasLtMatmulPreferenceSetAttribute(of(preference), attribute, &bytes,
                                                                  sizeof bytes);
      if (status != 0) return status;
    }
    return 0;
  }
  int choose(LtHandle handle, const LtCall& call, LtPreference preference, LtAlgorithm* algorithm,
             size_t* workspace, bool* found) override {
    cublasLtMatmulHeuristicResult_t result = {};
    int count = 0;
    const auto status =
        lt_.cublasLtMatmulAlgoGetHeuristic(handle, of(call.matmul), of(call.a_layout),
                                           of(call.b_layout), of(call.out_layout),
                                           of(call.out_layout), of(preference), 1, &result, &count);
    *found = status == CUBLAS_STATUS_SUCCESS && count > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    if (*found) {
      *as<cublasLtMatmulAlgo_t>(algorithm) = result.algo;
      *workspace = result.workspaceSize;
    }
    return status == CUBLAS_STATUS_NOT_SUPPORTED ? 0 : static_cast<int>(status);
  }
  int multiply(LtHandle handle, const LtCall& call, const LtAlgorithm& algorithm, void* workspace,
               size_t bytes, Stream stream) override {
    return lt_.cublasLtMatmul(handle, of(call.matmul), call.alpha, call.a, of(call.a_layout),
                              call.b, of(call.b_layout), call.beta, call.out, of(call.out_layout),
                              call.out, of(call.out_layout),
                              as<const cublasLtMatmulAlgo_t>(&algorithm), workspace, bytes, stream);
  }
  std::string text(int status) override {
    return lt_.cublasLtGetStatusString(static_cast<cublasStatus_t>(status));
  }

 private:
  const Functions lt_;
};

std::mutex lock;
Loaded* loaded = nullptr;  // never unloaded: handles live as long as the process

}  // namespace

size_t load_cublaslt(const std::string& path, std::string* error) {
  std::lock_guard<std::mutex> hold(lock);
  if (loaded == nullptr) {
    const auto functions = open_library<Functions>(path, error);
    if (functions == nullptr) return 0;
    loaded = new Loaded(*functions);
  }
  return loaded->version();
}

CublasLt& cublaslt() {
  std::lock_guard<std::mutex> hold(lock);
  if (loaded == nullptr) {
    throw failed_precondition("cuBLASLt isn't loaded; install nvidia-cublas, as jax[cuda13] does");
  }
  return *loaded;
}

}  // namespace jaxtap::cuda
