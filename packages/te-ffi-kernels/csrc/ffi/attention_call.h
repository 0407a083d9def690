// What the handlers of attention share: attributes, and the arrays of a call as a Problem.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "attention/attention.h"
#include "common/parallel.h"
#include "ffi/buffers.h"

namespace jaxtap::ffi {

// The attributes of Transformer Engine's handlers, with its numbers.
struct AttentionConfig {
  explicit AttentionConfig(const xffi::Dictionary& attributes)
      : batch(Get<int64_t>(attributes, "input_batch")),
        bias_batch(Get<int64_t>(attributes, "bias_batch")),
        q_length(Get<int64_t>(attributes, "q_max_seqlen")),
        kv_length(Get<int64_t>(attributes, "kv_max_seqlen")),
        heads(Get<int64_t>(attributes, "attn_heads")),
        kv_heads(Get<int64_t>(attributes, "num_gqa_groups")),
        bias_heads(Get<int64_t>(attributes, "bias_heads")),
        qk_size(Get<int64_t>(attributes, "qk_head_dim")),
        v_size(Get<int64_t>(attributes, "v_head_dim")),
        most_segments(Get<int64_t>(attributes, "max_segments_per_seq")),
        left(Get<int64_t>(attributes, "window_size_left")),
        right(Get<int64_t>(attributes, "window_size_right")),
        layout(Get<int64_t>(attributes, "qkv_layout")),
        bias_type(Get<int64_t>(attributes, "bias_type")),
        mask_type(Get<int64_t>(attributes, "mask_type")),
        softmax_type(Get<int64_t>(attributes, "softmax_type")),
        bottom_right(Get<bool>(attributes, "bottom_right_diagonal")),
        scale(static_cast<float>(Get<double>(attributes, "scaling_factor"))),
        dropout(Get<bool>(attributes, "is_training")
                    ? static_cast<float>(Get<double>(attributes, "dropout_probability"))
                    : 0.0f) {
    for (int64_t size : {batch, bias_batch, q_length, kv_length, bias_heads}) {
      if (size < 0) throw invalid_argument("an attribute that is a size is ", size);
    }
    if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0) {
      throw invalid_argument("attn_heads is ", heads, " and num_gqa_groups ", kv_heads,
                             ", of which it must be a multiple");
    }
    if (qk_size < 1 || v_size < 1 || most_segments < 1) {
      throw invalid_argument("qk_head_dim is ", qk_size, ", v_head_dim ", v_size,
                             " and max_segments_per_seq ", most_segments,
                             "; all must be positive");
    }
    if (layout != 5 && layout != 7 && layout != 9 && layout != 10 && layout != 12 && layout != 14) {
      throw invalid_argument("qkv_layout is ", layout, ", and must be 5, 7, 9, 10, 12 or 14");
    }
    if (packed_all() && (q_length != kv_length || heads != kv_heads)) {
      throw invalid_argument("qkv_layout is ", layout, ", with which keys are as many as queries");
    }
    if ((packed_all() || packed_keys()) && qk_size != v_size) {
      throw invalid_argument("qkv_layout is ", layout, ", with which qk_head_dim, ", qk_size,
                             ", must be v_head_dim, ", v_size);
    }
    Need("bias_type", bias_type, 2);
    Need("mask_type", mask_type, 5);
    Need("softmax_type", softmax_type, 2);
    if (bias_type != 0 && is_thd()) {
      throw invalid_argument("bias_type is ", bias_type, ", which a THD layout doesn't have");
    }
    if (bias_type != 0 && ((bias_batch != 1 && bias_batch != batch) ||
                           (bias_heads != 1 && bias_heads != heads))) {
      throw invalid_argument("bias_batch is ", bias_batch, " and bias_heads ", bias_heads,
                             "; they must be 1, or ", batch, " and ", heads);
    }
    if (!(dropout >= 0 && dropout < 1)) {
      throw invalid_argument("dropout_probability is ", dropout, ", and must be in [0, 1)");
    }
  }

  bool packed_all() const { return layout == 5 || layout == 10; }
  bool packed_keys() const { return layout == 7 || layout == 12; }
  bool is_thd() const { return layout >= 10; }
  bool is_causal() const { return mask_type >= 2; }
  bool is_padding() const { return mask_type == 1 || mask_type == 3 || mask_type == 5; }
  int64_t segments() const { return is_thd() ? batch * most_segments : batch; }

  int64_t batch, bias_batch, q_length, kv_length, heads, kv_heads, bias_heads, qk_size, v_size,
      most_segments, left, right, layout, bias_type, mask_type, softmax_type;
  bool bottom_right;
  float scale, dropout;

 private:
  template <typename T>
  static T Get(const xffi::Dictionary& attributes, const char* name) {
    const auto value = attributes.get<T>(name);
    if (!value.has_value()) {
      throw invalid_argument("attribute ", name, " is missing, or of another type");
    }
    return *value;
  }

  static void Need(const char* name, int64_t value, int64_t most) {
    if (value < 0 || value > most) {
      throw invalid_argument(name, " is ", value, ", and must be from 0 to ", most);
    }
  }
};

inline void NeedCount(const Array& array, int64_t size) {
  if (array.size() != size) {
    throw invalid_argument(array.name, " is ", array.Text(), ", and must have ", size,
                           " numbers, as the attributes have it");
  }
}

// Where sequences are. Lengths and offsets that can't be are cut to what is there.
class Sequences {
 public:
  Sequences(const AttentionConfig& config, const Array& q_cu, const Array& kv_cu, const Array& q_at,
            const Array& kv_at)
      : config_(config),
        q_cu_(Numbers(q_cu, config.segments() + 1)),
        kv_cu_(Numbers(kv_cu, config.segments() + 1)),
        q_at_(config.is_thd() ? Numbers(q_at, config.segments()) : nullptr),
        kv_at_(config.is_thd() ? Numbers(kv_at, config.segments()) : nullptr) {}

  // Whether all tokens are in one.
  bool are_whole() const { return !config_.is_thd() && !config_.is_padding(); }

  static attention::Segment At(const void* self, int64_t i) {
    return static_cast<const Sequences*>(self)->at(i);
  }

 private:
  static const int32_t* Numbers(const Array& array, int64_t least) {
    array.NeedDtype({DType::S32});
    if (array.size() < least) {
      throw invalid_argument(array.name, " is ", array.Text(), ", and must have at least ", least,
                             " numbers");
    }
    return static_cast<const int32_t*>(array.data);
  }

  static int64_t Length(const int32_t* cumulative, int64_t i) {
    return static_cast<int64_t>(cumulative[i + 1]) - cumulative[i];
  }

  attention::Segment at(int64_t i) const {
    attention::Segment segment;
    segment.number = i;
    const int64_t q_length = config_.q_length, kv_length = config_.kv_length;
    if (!config_.is_thd()) {
      segment.batch = i;
      segment.q_start = i * q_length;
      segment.kv_start = i * kv_length;
      segment.q_length = config_.is_padding() ? Cut(Length(q_cu_, i), q_length) : q_length;
      segment.kv_length = config_.is_padding() ? Cut(Length(kv_cu_, i), kv_length) : kv_length;
      segment.aux_start = i * config_.heads * q_length;
      return segment;
    }
    const int64_t queries = config_.batch * q_length, keys = config_.batch * kv_length;
    segment.q_start = Cut(q_at_[i], queries);
    segment.kv_start = Cut(kv_at_[i], keys);
    segment.q_length =
        Cut(Length(q_cu_, i), std::min(q_length, queries - segment.q_start));
    segment.kv_length =
        Cut(Length(kv_cu_, i), std::min(kv_length, keys - segment.kv_start));
    segment.aux_start = segment.q_start * config_.heads;
    return segment;
  }

  static int64_t Cut(int64_t value, int64_t most) {
    return std::max<int64_t>(0, std::min(value, most));
  }

  const AttentionConfig& config_;
  const int32_t *q_cu_, *kv_cu_, *q_at_, *kv_at_;
};

// Three arrays, or parts of the first or the second, with the tokens of q, k and v.
struct QkvTokens {
  attention::Tokens q, k, v;
};

inline QkvTokens ReadQkv(const AttentionConfig& c, const Array& q, const Array& k, const Array& v) {
  QkvTokens found;
  const auto part = [](const Array& array, int64_t begin, int64_t stride, int64_t size) {
    char* data = static_cast<char*>(array.data) +
                 begin * static_cast<int64_t>(byte_size(array.dtype));
    return attention::Tokens{data, stride, size};
  };
  const int64_t q_line = c.heads * c.qk_size, k_line = c.kv_heads * c.qk_size;
  const int64_t v_line = c.kv_heads * c.v_size;
  q.NeedDtype({DType::F32, DType::BF16, DType::F16});
  if (c.packed_all()) {
    NeedCount(q, c.batch * c.q_length * 3 * q_line);
    found.q = part(q, 0, 3 * q_line, c.qk_size);
    found.k = part(q, q_line, 3 * q_line, c.qk_size);
    found.v = part(q, 2 * q_line, 3 * q_line, c.qk_size);
    return found;
  }
  NeedCount(q, c.batch * c.q_length * q_line);
  k.NeedDtype({q.dtype});
  found.q = part(q, 0, q_line, c.qk_size);
  if (c.packed_keys()) {
    NeedCount(k, c.batch * c.kv_length * 2 * k_line);
    found.k = part(k, 0, 2 * k_line, c.qk_size);
    found.v = part(k, k_line, 2 * k_line, c.qk_size);
    return found;
  }
  v.NeedDtype({q.dtype});
  NeedCount(k, c.batch * c.kv_length * k_line);
  NeedCount(v, c.batch * c.kv_length * v_line);
  found.k = part(k, 0, k_line, c.qk_size);
  found.v = part(v, 0, v_line, c.v_size);
  return found;
}

// All of a call but its lengths. `random` is the seed and, if it has more numbers, the offset.
inline attention::Problem ReadProblem(const AttentionConfig& c, const Array& q, const Array& k,
                                      const Array& v, const Array& bias, const Array& sink,
                                      const Array& random, const Array& out, const Array& aux) {
  attention::Problem p;
  const QkvTokens tokens = ReadQkv(c, q, k, v);
  p.dtype = q.dtype;
  p.segments = c.segments();
  p.most_queries = c.q_length;
  p.most_keys = c.kv_length;
  p.q_heads = c.heads;
  p.kv_heads = c.kv_heads;
  p.qk_size = c.qk_size;
  p.v_size = c.v_size;
  p.q = tokens.q;
  p.k = tokens.k;
  p.v = tokens.v;
  NeedCount(out.NeedDtype({q.dtype}), c.batch * c.q_length * c.heads * c.v_size);
  p.out = {out.data, c.heads * c.v_size, c.v_size};
  p.scale = c.scale;
  p.bias_type = static_cast<attention::Bias>(c.bias_type);
  if (c.bias_type != 0) {
    NeedCount(bias.NeedDtype({q.dtype}), c.bias_batch * c.bias_heads * c.q_length * c.kv_length);
    p.bias = bias.data;
    p.bias_batches = c.bias_batch;
    p.bias_heads = c.bias_heads;
  }
  p.left = c.left;
  p.right = c.right;
  if (c.is_causal()) p.right = 0;
  p.bottom_right = c.bottom_right;
  if (c.softmax_type != 0) {
    NeedCount(sink.NeedDtype({DType::F32}), c.heads);
    p.sink = static_cast<const float*>(sink.data);
  }
  NeedCount(aux.NeedDtype({DType::F32}), c.batch * c.heads * c.q_length);
  p.aux = static_cast<float*>(aux.data);
  p.aux_token_stride = c.is_thd() ? c.heads : 1;
  p.aux_head_stride = c.is_thd() ? 1 : c.q_length;
  p.dropout = c.dropout;
  if (c.dropout > 0) {
    random.NeedDtype({DType::U32});
    if (random.size() < 2) {
      throw invalid_argument(random.name, " is ", random.Text(), ", and must have two numbers");
    }
    const auto* words = static_cast<const uint32_t*>(random.data);
    p.seed[0] = words[0];
    p.seed[1] = words[1];
    if (random.size() >= 4) p.offset = words[2];
  }
  return p;
}

// One number everywhere.
template <typename T>
void Fill(const Array& array, T value, const Parallel& parallel) {
  parallel.ranges(array.size(), 1 << 16, [&](int64_t begin, int64_t end) {
    std::fill(static_cast<T*>(array.data) + begin, static_cast<T*>(array.data) + end, value);
  });
}

inline void FillZero(const Array& array, const Parallel& parallel) {
  if (byte_size(array.dtype) == 4) {
    Fill<uint32_t>(array, 0, parallel);
  } else {
    Fill<uint16_t>(array, 0, parallel);
  }
}

}  // namespace jaxtap::ffi
