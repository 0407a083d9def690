// What the handlers of attention share: the arrays of a call as a Problem.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "attention/attention.h"
#include "common/parallel.h"
#include "ffi/attention_config.h"
#include "ffi/buffers.h"

namespace jaxtap::ffi {

inline void NeedCount(const Array& array, int64_t size) {
  if (array.size() != size) {
    throw invalid_argument(array.name, " is ", array.Text(), ", and must have ", size,
                           " numbers, as the attributes have it");
  }
}

// The arrays that say where sequences are.
struct SequenceArrays {
  SequenceArrays(const AttentionConfig& config, const Array& q_cu, const Array& kv_cu,
                 const Array& q_at, const Array& kv_at)
      : q_cu(Numbers(q_cu, config.segments() + 1)),
        kv_cu(Numbers(kv_cu, config.segments() + 1)),
        q_at(config.is_thd() ? Numbers(q_at, config.segments()) : nullptr),
        kv_at(config.is_thd() ? Numbers(kv_at, config.segments()) : nullptr) {}

  const int32_t *q_cu, *kv_cu, *q_at, *kv_at;

 private:
  static const int32_t* Numbers(const Array& array, int64_t least) {
    array.NeedDtype({DType::S32});
    if (array.size() < least) {
      throw invalid_argument(array.name, " is ", array.Text(), ", and must have at least ", least,
                             " numbers");
    }
    return static_cast<const int32_t*>(array.data);
  }
};

// Where sequences are. Lengths and offsets that can't be are cut to what is there.
class Sequences {
 public:
  Sequences(const AttentionConfig& config, const Array& q_cu, const Array& kv_cu, const Array& q_at,
            const Array& kv_at)
      : config_(config), arrays_(config, q_cu, kv_cu, q_at, kv_at) {}

  // Whether all tokens are in one.
  bool are_whole() const { return config_.all_are_whole(); }

  static attention::Segment At(const void* self, int64_t i) {
    return static_cast<const Sequences*>(self)->at(i);
  }

 private:
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
      segment.q_length = are_whole() ? q_length : Cut(Length(arrays_.q_cu, i), q_length);
      segment.kv_length = are_whole() ? kv_length : Cut(Length(arrays_.kv_cu, i), kv_length);
      segment.aux_start = i * config_.heads * q_length;
      return segment;
    }
    const int64_t queries = config_.batch * q_length, keys = config_.batch * kv_length;
    segment.q_start = Cut(arrays_.q_at[i], queries);
    segment.kv_start = Cut(arrays_.kv_at[i], keys);
    segment.q_length =
        Cut(Length(arrays_.q_cu, i), std::min(q_length, queries - segment.q_start));
    segment.kv_length =
        Cut(Length(arrays_.kv_cu, i), std::min(kv_length, keys - segment.kv_start));
    segment.aux_start = segment.q_start * config_.heads;
    return segment;
  }

  static int64_t Cut(int64_t value, int64_t most) {
    return std::max<int64_t>(0, std::min(value, most));
  }

  const AttentionConfig& config_;
  const SequenceArrays arrays_;
};

// Three arrays, or parts of the first or the second, with the tokens of q, k and v.
struct QkvTokens {
  attention::Tokens q, k, v;
};

inline QkvTokens ReadQkv(const AttentionConfig& c, const Array& q, const Array& k, const Array& v) {
  const QkvLines lines(c);
  const auto part = [](const Array& array, const Lines& line) {
    char* data = static_cast<char*>(array.data) +
                 line.begin * static_cast<int64_t>(byte_size(array.dtype));
    return attention::Tokens{data, line.stride, line.size};
  };
  q.NeedDtype({DType::F32, DType::BF16, DType::F16});
  NeedCount(q, c.batch * c.q_length * lines.q.stride);
  if (c.packed_all()) return {part(q, lines.q), part(q, lines.k), part(q, lines.v)};
  k.NeedDtype({q.dtype});
  if (!c.packed_keys()) v.NeedDtype({q.dtype});
  NeedCount(k, c.batch * c.kv_length * lines.k.stride);
  if (c.packed_keys()) return {part(q, lines.q), part(k, lines.k), part(k, lines.v)};
  NeedCount(v, c.batch * c.kv_length * lines.v.stride);
  return {part(q, lines.q), part(k, lines.k), part(v, lines.v)};
}

// All of a call but its lengths and random numbers: addresses may be a GPU's.
inline attention::Problem ReadProblem(const AttentionConfig& c, const Array& q, const Array& k,
                                      const Array& v, const Array& bias, const Array& sink,
                                      const Array& out, const Array& aux) {
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
  return p;
}

// The seed and, if there are more numbers, the offset.
inline const uint32_t* RandomWords(const AttentionConfig& c, const Array& random) {
  if (!(c.dropout > 0)) return nullptr;
  random.NeedDtype({DType::U32});
  if (random.size() < 2) {
    throw invalid_argument(random.name, " is ", random.Text(), ", and must have two numbers");
  }
  return static_cast<const uint32_t*>(random.data);
}

inline void ReadRandom(const AttentionConfig& c, const Array& random, attention::Problem& p) {
  const uint32_t* words = RandomWords(c, random);
  if (words == nullptr) return;
  p.seed[0] = words[0];
  p.seed[1] = words[1];
  if (random.size() >= 4) p.offset = words[2];
}

// The results of backward.
struct GradientArrays {
  Array q, k, v, bias, sink;
};

inline attention::Gradients ReadGradients(const AttentionConfig& c, const attention::Problem& p,
                                          const Array& out_grad, const GradientArrays& results) {
  attention::Gradients gradients;
  NeedCount(out_grad.NeedDtype({p.dtype}), c.batch * c.q_length * c.heads * c.v_size);
  gradients.out_grad = {out_grad.data, p.out.token_stride, p.out.head_stride};
  results.q.NeedDtype({p.dtype});
  const QkvTokens tokens = ReadQkv(c, results.q, results.k, results.v);
  gradients.q_grad = tokens.q;
  gradients.k_grad = tokens.k;
  gradients.v_grad = tokens.v;
  if (c.bias_type != 0) {
    NeedCount(results.bias.NeedDtype({p.dtype}),
              c.bias_batch * c.bias_heads * c.q_length * c.kv_length);
    gradients.bias_grad = results.bias.data;
  }
  if (c.softmax_type != 0) {
    NeedCount(results.sink.NeedDtype({DType::F32}), c.heads);
    gradients.sink_grad = static_cast<float*>(results.sink.data);
  }
  return gradients;
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
