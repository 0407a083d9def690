// Attention of a few queries over a cache of keys and values, as in decoding: it takes as long as
// reading the positions that are seen.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"

namespace jaxtap::decode {

struct Attention {
  int64_t batch = 0, queries = 0, kv_heads = 0;
  int64_t group = 1;  // heads of queries for each of keys
  int64_t positions = 0, size = 0;  // of the cache, and of a head

  const void* q = nullptr;  // [batch, queries, kv_heads, group, size]
  DType q_dtype = DType::F32;
  // [batch, kv_heads, positions, size], or [batch, positions, kv_heads, size].
  bool heads_first = true;
  const void* keys = nullptr;
  const void* values = nullptr;
  DType cache_dtype = DType::F32;  // float32, bfloat16, float16 or int8
  const float* key_scales = nullptr;    // as keys, without the last axis; or null
  const float* value_scales = nullptr;  // the same
  // Query i of n sees positions before lengths[b] - n + 1 + i, those up to its own, if `causal`;
  // else those before lengths[b].
  const int32_t* lengths = nullptr;  // [batch]
  bool causal = true;
  // bool[batch or 1, queries or 1, positions], or null: true where a position is seen, too.
  const uint8_t* mask = nullptr;
  int64_t mask_batch = 1, mask_queries = 1;
  int64_t window = 0;    // the last positions that are seen; 0 for all
  float scale = 1.0f;    // of logits
  float softcap = 0.0f;  // logits become softcap * tanh(logit / softcap), but for 0

  void* out = nullptr;  // as q
  DType out_dtype = DType::F32;
};

// In float32, rounded at the end. A query that sees nothing gives zeros. Positions that no query of
// a sequence can see by its length and window are not read. The result does not depend on the
// number of threads.
void attend(const Attention& args, const Parallel& parallel);

}  // namespace jaxtap::decode
