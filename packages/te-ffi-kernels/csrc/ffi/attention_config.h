// The attributes of attention's handlers, with Transformer Engine's numbers, and where tokens are.
// Needs no header of XLA.

#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "ffi/attributes.h"

namespace jaxtap::ffi {

struct AttentionConfig {
  template <class Attributes>
  explicit AttentionConfig(const Attributes& attributes)
      : batch(NeedAttribute<int64_t>(attributes, "input_batch")),
        bias_batch(NeedAttribute<int64_t>(attributes, "bias_batch")),
        q_length(NeedAttribute<int64_t>(attributes, "q_max_seqlen")),
        kv_length(NeedAttribute<int64_t>(attributes, "kv_max_seqlen")),
        heads(NeedAttribute<int64_t>(attributes, "attn_heads")),
        kv_heads(NeedAttribute<int64_t>(attributes, "num_gqa_groups")),
        bias_heads(NeedAttribute<int64_t>(attributes, "bias_heads")),
        qk_size(NeedAttribute<int64_t>(attributes, "qk_head_dim")),
        v_size(NeedAttribute<int64_t>(attributes, "v_head_dim")),
        most_segments(NeedAttribute<int64_t>(attributes, "max_segments_per_seq")),
        left(std::min(kMost, NeedAttribute<int64_t>(attributes, "window_size_left"))),
        right(std::min(kMost, NeedAttribute<int64_t>(attributes, "window_size_right"))),
        layout(NeedAttribute<int64_t>(attributes, "qkv_layout")),
        bias_type(NeedAttribute<int64_t>(attributes, "bias_type")),
        mask_type(NeedAttribute<int64_t>(attributes, "mask_type")),
        softmax_type(NeedAttribute<int64_t>(attributes, "softmax_type")),
        bottom_right(NeedAttribute<bool>(attributes, "bottom_right_diagonal")),
        deterministic(NeedAttribute<bool>(attributes, "deterministic")),
        scale(static_cast<float>(NeedAttribute<double>(attributes, "scaling_factor"))),
        dropout(NeedAttribute<bool>(attributes, "is_training")
                    ? static_cast<float>(NeedAttribute<double>(attributes, "dropout_probability"))
                    : 0.0f) {
    for (int64_t size : {batch, bias_batch, q_length, kv_length, bias_heads}) {
      if (size < 0) throw invalid_argument("attributes of sizes must be at least 0, got ", size);
    }
    NeedFew({3, batch, most_segments, std::max(q_length, kv_length), heads,
             std::max(qk_size, v_size)});
    NeedFew({batch, heads, q_length, kv_length});
    if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0) {
      throw invalid_argument("attn_heads must be a multiple of num_gqa_groups, ", kv_heads,
                             ", got ", heads);
    }
    if (qk_size < 1 || v_size < 1 || most_segments < 1) {
      throw invalid_argument("qk_head_dim, v_head_dim and max_segments_per_seq must be positive, "
                             "got ", qk_size, ", ", v_size, " and ", most_segments);
    }
    if (layout != 5 && layout != 7 && layout != 9 && layout != 10 && layout != 12 && layout != 14) {
      throw invalid_argument("qkv_layout must be 5, 7, 9, 10, 12 or 14, got ", layout);
    }
    if (packed_all() && (q_length != kv_length || heads != kv_heads)) {
      throw invalid_argument("qkv_layout is ", layout, ", with which keys are as many as queries");
    }
    if ((packed_all() || packed_keys()) && qk_size != v_size) {
      throw invalid_argument("qk_head_dim must be v_head_dim, ", v_size, ", with qkv_layout ",
                             layout, ", got ", qk_size);
    }
    Need("bias_type", bias_type, 2);
    Need("mask_type", mask_type, 5);
    Need("softmax_type", softmax_type, 2);
    if (bias_type != 0 && is_thd()) {
      throw invalid_argument("bias_type is ", bias_type, ", which a THD layout doesn't have");
    }
    if (bias_type != 0 && ((bias_batch != 1 && bias_batch != batch) ||
                           (bias_heads != 1 && bias_heads != heads))) {
      throw invalid_argument("bias_batch and bias_heads must be 1, or ", batch, " and ", heads,
                             ", got ", bias_batch, " and ", bias_heads);
    }
    if (!(dropout >= 0 && dropout < 1)) {
      throw invalid_argument("dropout_probability must be in [0, 1), got ", dropout);
    }
  }

  bool packed_all() const { return layout == 5 || layout == 10; }
  bool packed_keys() const { return layout == 7 || layout == 12; }
  bool is_thd() const { return layout >= 10; }
  bool is_causal() const { return mask_type >= 2; }
  bool is_padding() const { return mask_type == 1 || mask_type == 3 || mask_type == 5; }
  // Whether each batch entry is one sequence, of all its tokens.
  bool all_are_whole() const { return !is_thd() && !is_padding(); }
  int64_t segments() const { return is_thd() ? batch * most_segments : batch; }

  int64_t batch, bias_batch, q_length, kv_length, heads, kv_heads, bias_heads, qk_size, v_size,
      most_segments, left, right, layout, bias_type, mask_type, softmax_type;
  bool bottom_right, deterministic;
  float scale, dropout;

 private:
  static constexpr int64_t kMost = int64_t{1} << 59;  // numbers of an array, whose bytes are counted

  // Throws where the product of sizes is more than there can be.
  static void NeedFew(std::initializer_list<int64_t> sizes) {
    int64_t product = 1;
    for (int64_t size : sizes) {
      if (size > 0 && (__builtin_mul_overflow(product, size, &product) || product > kMost)) {
        throw invalid_argument("the attributes are those of arrays of more than 2**59 numbers");
      }
    }
  }

  static void Need(const char* name, int64_t value, int64_t most) {
    if (value < 0 || value > most) {
      throw invalid_argument(name, " must be from 0 to ", most, ", got ", value);
    }
  }
};

// Where the numbers of a token's heads are in an array: from `begin` on, tokens `stride` apart,
// heads side by side, `size` numbers each.
struct Lines {
  int64_t begin, stride, size;
};

// Of queries, keys and values, each in an array of its own or in a part of one.
struct QkvLines {
  explicit QkvLines(const AttentionConfig& c) {
    const int64_t q_line = c.heads * c.qk_size, k_line = c.kv_heads * c.qk_size;
    const int64_t v_line = c.kv_heads * c.v_size;
    if (c.packed_all()) {
      q = {0, 3 * q_line, c.qk_size};
      k = {q_line, 3 * q_line, c.qk_size};
      v = {2 * q_line, 3 * q_line, c.qk_size};
      return;
    }
    q = {0, q_line, c.qk_size};
    k = {0, c.packed_keys() ? 2 * k_line : k_line, c.qk_size};
    v = c.packed_keys() ? Lines{k_line, 2 * k_line, c.v_size} : Lines{0, v_line, c.v_size};
  }
  Lines q, k, v;
};

}  // namespace jaxtap::ffi
