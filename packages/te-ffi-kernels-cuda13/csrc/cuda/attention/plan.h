// Attention by cuDNN: a plan of a call site on a device, and its calls, which allocate nothing and
// never wait for the device.
#pragma once

#include "cuda/attention/plans.h"
#include "cuda/attention/steps.h"

namespace jaxtap::cuda {

// What `execute` has, on the device.
struct AttentionMemory {
  void *q = nullptr, *k = nullptr, *v = nullptr;  // where the first token's first head is
  void* bias = nullptr;
  float* sink = nullptr;
  void* out = nullptr;  // results of forward, which backward reads
  float* stats = nullptr;
  const uint32_t* random = nullptr;  // a seed of two words, or a state of four
  int64_t words = 0;
  const int32_t *q_cumulative = nullptr, *kv_cumulative = nullptr;
  const int32_t *q_at = nullptr, *kv_at = nullptr;

  uint32_t* state = nullptr;  // of forward
  int64_t state_words = 0;

  void* out_grad = nullptr;  // of backward
  void *q_grad = nullptr, *k_grad = nullptr, *v_grad = nullptr, *bias_grad = nullptr;
  float* sink_grad = nullptr;

  void* workspace = nullptr;
  size_t bytes = 0;
};

class AttentionPlan {
 public:
  // Throws where cuDNN has no such graph, or needs more than `workspace` bytes for it.
  AttentionPlan(Cudnn& dnn, Runtime& cuda, const DnnPlans::Entry& entry,
                const AttentionWorkspace& steps, size_t workspace);

  void run(const AttentionMemory& memory, Stream stream) const;

 private:
  AttentionArrays arrays(const AttentionMemory& memory, char* workspace) const;
  void prepare(const AttentionMemory& memory, char* workspace, Stream stream) const;
  void finish(const AttentionMemory& memory, Stream stream) const;

  Cudnn& dnn_;
  Runtime& cuda_;
  const DnnPlans::Entry& entry_;
  const AttentionWorkspace steps_;
};

}  // namespace jaxtap::cuda
