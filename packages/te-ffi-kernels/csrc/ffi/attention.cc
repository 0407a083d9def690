// Handlers of fused_attn_forward and fused_attn_backward. `deterministic`, and whether it is a
// training step, make no difference but for dropout.

#include <algorithm>
#include <limits>

#include "ffi/attention_call.h"
#include "ffi/call.h"

namespace jaxtap::ffi {
namespace {

// Where sequences are. Lengths and offsets that can't be are cut to what is there.
class Sequences {
 public:
  Sequences(const AttentionConfig& config, const SequenceArrays& arrays)
      : config_(config), arrays_(arrays) {}

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
  const SequenceArrays& arrays_;
};

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

void Forward(const AttentionForwardCall& given, const Parallel& parallel) {
  const Sequences sequences(given.config, given.sequences);
  attention::Problem p = given.problem;
  if (given.random != nullptr) std::copy_n(given.random, 2, p.seed);
  p.segment = Sequences::At;
  p.context = &sequences;
  if (!sequences.are_whole()) {
    FillZero(given.out, parallel);
    Fill<float>(given.aux, -std::numeric_limits<float>::infinity(), parallel);
  }
  attention::forward(p, parallel);
  const Array &seed = given.seed, &state = given.state;
  Fill<uint32_t>(state, 0, Parallel());
  std::copy_n(static_cast<const uint32_t*>(seed.data),
              std::min<int64_t>({2, seed.size(), state.size()}),
              static_cast<uint32_t*>(state.data));
}

// The result is the same at each call, whatever `deterministic` says.
void Backward(const AttentionBackwardCall& given, const Parallel& parallel) {
  const Sequences sequences(given.config, given.sequences);
  attention::Problem p = given.problem;
  if (given.random != nullptr) {
    std::copy_n(given.random, 2, p.seed);
    if (given.state.size() >= 4) p.offset = given.random[2];
  }
  p.segment = Sequences::At;
  p.context = &sequences;
  if (!sequences.are_whole()) {
    const GradientArrays& results = given.results;
    for (const Array* array : {&results.q, &results.k, &results.v}) FillZero(*array, parallel);
  }
  attention::backward(p, given.gradients, parallel);
}

const Handlers<AttentionForwardCall, Forward> kForward;
const Handlers<AttentionBackwardCall, Backward> kBackward;

}  // namespace
}  // namespace jaxtap::ffi
