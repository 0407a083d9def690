// A matmul's plan: what cuBLASLt is to be told, and the algorithm, made once per call site and
// device; and its calls, which allocate nothing and never wait for the device.
#pragma once

#include <mutex>
#include <string>

#include "cuda/cublaslt.h"
#include "cuda/gemm/steps.h"

namespace jaxtap::cuda {

// What `execute` has.
struct GemmMemory {
  const float* alpha = nullptr;  // on the device, as everything
  const float* beta = nullptr;   // must be 0, or the result is NaN
  void* workspace = nullptr;
  size_t bytes = 0;
};

class GemmPlan {
 public:
  struct Options {
    bool has_bias = false;
    bool fast = false;     // sums of float8 may lose digits
    size_t workspace = 0;  // bytes that there will be
    uint32_t alignment = 16;  // of operands and results; XLA's arrays have it
  };

  // Takes from `args` everything but addresses. Throws where cuBLASLt has no algorithm.
  GemmPlan(CublasLt& lt, LtHandle handle, const te::Gemm& args, const Options& options);

  // `args` is what the plan was made for, with addresses.
  void run(const te::Gemm& args, const GemmMemory& memory, Stream stream);

  const GemmWorkspace& steps() const { return steps_; }

 private:
  void describe(const te::Gemm& args, bool fast);
  void choose(const te::Gemm& args, size_t workspace);
  LtCall call() const;

  CublasLt& lt_;
  const LtHandle handle_;
  const GemmWorkspace steps_;
  const uint32_t alignment_;
  // Addresses are part of the description: one call at a time.
  std::mutex lock_;
  OwnedMatmul matmul_;
  OwnedLayout a_, b_, out_;
  LtAlgorithm algorithm_ = {};
  size_t workspace_ = 0;
};

// Why cuBLASLt has no algorithm for a matmul, within `limit` bytes of its own; empty where it has
// one. Throws where it can't be asked. Asked when kernels are chosen, so that what it refuses runs
// as plain JAX; a plan that can't be made later is an error.
std::string gemm_refusal(CublasLt& lt, LtHandle handle, const te::Gemm& args, bool has_bias,
                         bool fast, size_t limit);

}  // namespace jaxtap::cuda
