// Handlers of fused_attn_forward and fused_attn_backward. `deterministic`, and whether it is a
// training step, make no difference but for dropout.

#include <algorithm>
#include <limits>
#include <vector>

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

// One query and one key, of the sizes of the heads, unless these are more than a warm-up is worth;
// which dtype they will have, nobody knows yet.
class Least {
 public:
  explicit Least(const AttentionConfig& config)
      : qk_size_(std::min<int64_t>(config.qk_size, 1024)),
        v_size_(std::min<int64_t>(config.v_size, 1024)),
        numbers_(static_cast<size_t>(4 * (qk_size_ + v_size_))),
        at_(numbers_.data()) {
    problem.segments = problem.most_queries = problem.most_keys = 1;
    problem.q_heads = problem.kv_heads = 1;
    problem.segment = [](const void*, int64_t) {
      attention::Segment segment;
      segment.q_length = segment.kv_length = 1;
      return segment;
    };
    problem.qk_size = qk_size_;
    problem.v_size = v_size_;
    problem.q = problem.k = Next(qk_size_);
    problem.v = Next(v_size_);
    problem.out = Next(v_size_);
    problem.aux = &aux_;
  }

  attention::Gradients Gradients() {
    attention::Gradients gradients;
    gradients.out_grad = problem.v;
    gradients.q_grad = Next(qk_size_);
    gradients.k_grad = Next(qk_size_);
    gradients.v_grad = Next(v_size_);
    return gradients;
  }

  attention::Problem problem;

 private:
  attention::Tokens Next(int64_t size) {
    float* const numbers = at_;
    at_ += size;
    return {numbers, size, size};
  }

  const int64_t qk_size_, v_size_;
  std::vector<float> numbers_;
  float* at_;
  float aux_ = 0;
};

void WarmForward(const AttentionConfig& config) {
  Least least(config);
  for (DType dtype : {DType::F32, DType::BF16}) {
    least.problem.dtype = dtype;
    attention::forward(least.problem, Parallel());
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

void WarmBackward(const AttentionConfig& config) {
  Least least(config);
  const attention::Gradients gradients = least.Gradients();
  for (DType dtype : {DType::F32, DType::BF16}) {
    least.problem.dtype = dtype;
    attention::backward(least.problem, gradients, Parallel());
  }
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

const Handlers<AttentionForwardCall, WarmForward, Forward> kForward;
const Handlers<AttentionBackwardCall, WarmBackward, Backward> kBackward;

}  // namespace
}  // namespace jaxtap::ffi
