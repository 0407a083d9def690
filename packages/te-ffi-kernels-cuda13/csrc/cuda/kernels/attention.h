// What is done before and after cuDNN's attention.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace jaxtap::cuda {

// One side of attention's segments: queries, or keys.
struct AttentionSide {
  const int32_t* cumulative = nullptr;  // [segments + 1]: lengths are differences
  const int32_t* at = nullptr;          // [segments]: where they begin; nullptr: one after the other
  int64_t most = 0;                     // tokens of a segment
  int64_t tokens = 0;                   // of all
};

// Lengths and places of segments in cuDNN's form, and the random state, by one block. Lengths and
// places that can't be are cut to what is there. A segment without keys becomes one without
// queries, whose one key nobody sees. Where segments have places, those with a query and a key come
// first, in their order, and all others are empty and at the end.
struct AttentionSegments {
  int64_t segments = 0;
  AttentionSide q, kv;
  int32_t* q_lengths = nullptr;  // [segments]; nullptr: not wanted
  int32_t* kv_lengths = nullptr;
  // [5][segments + 1]: of q, k, v, out and stats, tokens times what these are apart.
  int64_t* places = nullptr;
  int64_t strides[5] = {};

  const uint32_t* random = nullptr;  // seed, and offset where there are four; nullptr: none
  int64_t words = 0;
  int64_t* seed = nullptr;     // [2]: seed and offset; nullptr: not wanted
  uint32_t* state = nullptr;   // the seed, and zeros; nullptr: not wanted
  int64_t state_words = 0;
};

// -inf in all places.
struct AttentionNone {
  float* out = nullptr;
  int64_t count = 0;
};

// A copy of log-sum-exps, of which those of nothing, -inf, become inf.
struct AttentionStats {
  const float* stats = nullptr;
  float* out = nullptr;
  int64_t count = 0;
};

// Zeros for the tokens of `own` that see none of `other`: nothing is within [-left, right] of them,
// -1 being without end, or they are beyond their segment's length (where segments have no places;
// else nothing is written there).
struct AttentionClear {
  int64_t segments = 0;
  AttentionSide own, other;
  int64_t left = -1, right = -1;
  bool bottom_right = false;  // places are counted from the segments' ends

  uint32_t* data = nullptr;  // pairs of numbers
  int64_t stride = 0;        // of tokens, in pairs
  int64_t width = 0;         // pairs to clear
  // Of log-sum-exps: that of nothing, or of the sink alone.
  float* stats = nullptr;  // or nullptr
  int64_t heads = 0;
  int64_t stats_segment = 0, stats_head = 0, stats_token = 0;
  const float* sink = nullptr;  // [heads], or nullptr
};

void attention_segments(const AttentionSegments& args, Stream stream);
void attention_none(const AttentionNone& args, Stream stream);
void attention_stats(const AttentionStats& args, Stream stream);
void attention_clear(const AttentionClear& args, Stream stream);

}  // namespace jaxtap::cuda
