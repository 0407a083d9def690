// What attention takes beside cuDNN's graph, which follows from the attributes alone: parts of the
// workspace, and what kernels do before and after.
#pragma once

#include <cstddef>

#include "cuda/attention/graph.h"
#include "cuda/workspace.h"
#include "ffi/attention_config.h"

namespace jaxtap::cuda {

struct AttentionWorkspace {
  // Throws for what cuDNN's attention can't be asked for.
  AttentionWorkspace(const ffi::AttentionConfig& config, DType dtype, bool backward);

  AttentionGraph graph;
  int arrays = 3;                       // that queries, keys and values are in
  int64_t tokens_q = 0, tokens_kv = 0;  // of all batch entries
  // Backward reads a copy of the log-sum-exp, where rows that see nothing have inf and not -inf:
  // the exponent of a score less that is 0, whatever the score.
  bool copies_stats = false;

  // Where parts of the workspace begin, and the bytes of all. What is left is cuDNN's.
  size_t seed = 0, q_lengths = 0, kv_lengths = 0, places = 0, stats = 0, bytes = 0;
};

}  // namespace jaxtap::cuda
