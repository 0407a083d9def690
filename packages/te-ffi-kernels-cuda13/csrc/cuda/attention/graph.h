// What cuDNN is asked for: attention of a call site, or its gradients, as sizes and strides alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace jaxtap::cuda {

// In elements. The numbers of a head are side by side.
struct AttentionStrides {
  int64_t segment = 0, head = 0, token = 0;
};

struct AttentionGraph {
  bool backward = false;
  DType dtype = DType::BF16;  // of all but log-sum-exps, sinks and what is integers
  int64_t segments = 0, queries = 0, keys = 0;  // queries and keys: the most of a segment
  int64_t q_heads = 0, kv_heads = 0, qk_size = 0, v_size = 0;
  AttentionStrides q, k, v, out, stats;  // gradients lie as what they are of
  bool padded = false;                   // segments have lengths
  // Segments begin where offsets say, and their strides mean nothing; `padded` holds too.
  bool ragged = false;
  int64_t q_tokens = 0, kv_tokens = 0;  // of all segments

  // Query i sees key j where j - i - shift is within [-left, right]; -1: without end. The shift is
  // 0, or keys - queries of the segment.
  int64_t left = -1, right = -1;
  bool bottom_right = false;

  bool has_bias = false;  // [batches, heads, queries, keys], added to scaled scores
  int64_t bias_batches = 1, bias_heads = 1;
  bool has_sink = false;  // [q_heads]: a score that takes part in each softmax's sum
  float scale = 1, dropout = 0;
  bool deterministic = false;  // gradients have the same bits each time

  // All of the above: graphs with the same key are the same.
  using Key = std::array<int64_t, 38>;
  Key key() const {
    const auto bits = [](float x) {
      int32_t out;
      std::memcpy(&out, &x, sizeof out);
      return static_cast<int64_t>(out);
    };
    const auto of = [](const AttentionStrides& s, int i) {
      return i == 0 ? s.segment : i == 1 ? s.head : s.token;
    };
    Key key = {backward, static_cast<int64_t>(dtype), segments, queries, keys, q_heads, kv_heads,
               qk_size, v_size, padded, ragged, q_tokens, kv_tokens, left, right, bottom_right,
               has_bias, bias_batches, bias_heads, has_sink, bits(scale), bits(dropout),
               deterministic};
    size_t at = 23;
    for (const AttentionStrides* one : {&q, &k, &v, &out, &stats}) {
      for (int i = 0; i < 3; ++i) key[at++] = of(*one, i);
    }
    return key;
  }
};

// The arrays of a graph. "At" are offsets of segments in elements, int64[segments + 1]; lengths are
// int32[segments]; seed and offset are int64.
enum class AttentionArray {
  kQ, kK, kV, kOut, kStats, kBias, kSink,
  kQLengths, kKvLengths, kQAt, kKAt, kVAt, kOutAt, kStatsAt, kSeed, kOffset,
  kOutGrad, kQGrad, kKGrad, kVGrad, kBiasGrad, kSinkGrad, kCount
};

// Addresses on the device; nullptr where a graph has none.
struct AttentionArrays {
  void*& operator[](AttentionArray which) { return all[static_cast<size_t>(which)]; }
  void* operator[](AttentionArray which) const { return all[static_cast<size_t>(which)]; }
  std::array<void*, static_cast<size_t>(AttentionArray::kCount)> all = {};
};

}  // namespace jaxtap::cuda
