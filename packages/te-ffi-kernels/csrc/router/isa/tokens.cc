// The choice of experts for a token, its gradient, and sums over tokens.

#include "router/isa/scores.h"
#include "router/isa/select.h"
#include "router/table.h"

namespace jaxtap::router::JAXTAP_ISA_NAMESPACE {
namespace {

// Scores of logits, and what is saved of them for the gradient. Lanes past the end are undefined.
template <class Format>
void score(const Options& options, const typename Format::Type* logits, float* scores,
           float* saved) {
  const int64_t count = options.experts;
  switch (options.score) {
    case Score::kSoftmax:
      over(count, [&](int64_t i, auto part) {
        write(scores + i, first_n(load<Format>(logits + i, part), part, -kInfinity));
      });
      if (options.pre_softmax || options.dense) {
        softmax(scores, count);
        over(count, [&](int64_t i, auto part) {
          store<F32>(saved + i, read<Floats>(scores + i), part);
        });
      } else {
        over(count, [&](int64_t i, auto part) { store<F32>(saved + i, all(-kInfinity), part); });
      }
      return;
    case Score::kSigmoid:
      over(count, [&](int64_t i, auto part) {
        const Floats y = sigmoid(load<Format>(logits + i, part));
        store<F32>(saved + i, y, part);
        write(scores + i, y);
      });
      return;
    case Score::kSqrtSoftplus:
      over(count, [&](int64_t i, auto part) {
        const Floats x = load<Format>(logits + i, part);
        store<F32>(saved + i, x, part);
        write(scores + i, sqrt_softplus(x));
      });
  }
}

// The best of the best groups, as `select`.
void select_in_groups(const Options& options, const float* scores, const Scratch& scratch) {
  const int64_t size = options.experts / options.groups;
  const int64_t each = options.topk / options.group_topk;
  float* sums = scratch.picked;
  for (int64_t group = 0; group < options.groups; ++group) {
    const float* of_group = scores + group * size;
    if (size <= 32) {
      sums[group] = size <= 16 ? sum_of_few<16>(of_group, size, each)
                               : sum_of_few<32>(of_group, size, each);
      continue;
    }
    select(of_group, size, each, scratch.chosen);
    float sum = 0.0f;
    for (int64_t i = 0; i < each; ++i) sum += of_group[scratch.chosen[i]];
    sums[group] = sum;
  }
  select(sums, options.groups, options.group_topk, scratch.members);
  float* among = scratch.picked;
  // Groups are chosen in ascending order, and so are experts of them.
  for (int64_t i = 0; i < options.group_topk; ++i) {
    std::memcpy(among + i * size, scores + scratch.members[i] * size,
                static_cast<size_t>(size) * sizeof(float));
  }
  select(among, options.group_topk * size, options.topk, scratch.chosen);
  for (int64_t i = 0; i < options.topk; ++i) {
    const int32_t at = scratch.chosen[i];
    scratch.chosen[i] = static_cast<int32_t>(scratch.members[at / size] * size + at % size);
  }
}

template <class Format>
JAXTAP_INLINE typename Format::Type narrow_one(float x) {
  if constexpr (sizeof(typename Format::Type) == 4) {
    return x;
  } else {
    return Format::narrow(all(x))[0];
  }
}

void divide(float* row, int64_t count) {
  pad(row, count, 0.0f);
  Floats sums = all(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) sums += read<Floats>(row + i);
  const float sum = sum_of(sums) + kEpsilon;
  for (int64_t i = 0; i < count; i += kLanes) write(row + i, read<Floats>(row + i) / sum);
}

void fill_map(const Options& options, const int32_t* chosen, uint8_t* map) {
  const int64_t bytes = map_bytes(options.format, options.experts);
  std::memset(map, 0, static_cast<size_t>(bytes));
  if (options.format == MapFormat::kBits) {
    for (int64_t i = 0; i < options.topk; ++i) {
      map[chosen[i] / 8] |= static_cast<uint8_t>(1 << (chosen[i] % 8));
    }
  } else {
    for (int64_t i = 0; i < options.topk; ++i) map[chosen[i]] = 1;
  }
}

template <class Format>
void forward(const Forward& args, int64_t token, const Scratch& scratch) {
  using Type = typename Format::Type;
  const Options& options = args.options;
  const int64_t count = options.experts, topk = options.topk, at = token * count;
  const bool softmax_scores = options.score == Score::kSoftmax;
  float* saved = args.saved + at;
  float *scores = scratch.scores, *picked = scratch.picked;
  auto* probs = static_cast<Type*>(args.probs) + at;
  score<Format>(options, static_cast<const Type*>(args.logits) + at, scores, saved);
  if (options.dense && !softmax_scores) divide(scores, count);

  const float* ranked = scores;
  if (args.bias != nullptr) {
    over(count, [&](int64_t i, auto part) {
      write(scratch.ranked + i, read<Floats>(scores + i) + load<F32>(args.bias + i, part));
    });
    ranked = scratch.ranked;
  }
  if (options.group_topk > 0) {
    select_in_groups(options, ranked, scratch);
  } else {
    select(ranked, count, topk, scratch.chosen);
  }
  const int32_t* chosen = scratch.chosen;
  fill_map(options, chosen, args.map + token * map_bytes(options.format, count));

  if (options.dense) {
    over(count, [&](int64_t i, auto part) {
      store<Format>(probs + i, read<Floats>(scores + i), part);
    });
    return;
  }
  for (int64_t i = 0; i < topk; ++i) picked[i] = scores[chosen[i]];
  if (softmax_scores && !options.pre_softmax) {
    pad(picked, topk, -kInfinity);
    softmax(picked, topk);
    for (int64_t i = 0; i < topk; ++i) saved[chosen[i]] = picked[i];
  } else if (!softmax_scores && topk > 1) {
    divide(picked, topk);
  }
  std::memset(probs, 0, static_cast<size_t>(count) * sizeof(Type));
  for (int64_t i = 0; i < topk; ++i) {
    probs[chosen[i]] = narrow_one<Format>(options.scaling * picked[i]);
  }
}

// Of the score function, of saved numbers.
template <Score kScore>
JAXTAP_INLINE Floats value(Floats saved) {
  if constexpr (kScore == Score::kSqrtSoftplus) return sqrt_softplus(saved);
  return saved;
}

template <class Format, Score kScore>
void backward(const Options& options, const uint8_t* map, const float* saved, const void* grads,
              void* to) {
  using Type = typename Format::Type;
  const auto* grad = static_cast<const Type*>(grads);
  auto* out = static_cast<Type*>(to);
  const int64_t count = options.experts;
  const float scaling = options.scaling;
  const auto chosen = [&](int64_t i, auto part) {
    return map == nullptr ? Ints{} - 1 : widen(read<Bytes>(map + i, part)) != 0;
  };
  const Floats zero = all(0.0f);
  // Over those chosen: of values, and of values times their gradients.
  Floats values = zero, products = zero;
  over(count, [&](int64_t i, auto part) {
    const Ints routed = chosen(i, part);
    const Floats y = routed ? first_n(value<kScore>(load<F32>(saved + i, part)), part, 0.0f) : zero;
    values += y;
    products = fma(load<Format>(grad + i, part) * scaling, y, products);
  });
  const float dot = sum_of(products);
  // Scores that were divided by their sum: the gradient of one is g / sum - dot / sum^2.
  const bool divided = kScore != Score::kSoftmax && (options.dense || options.topk > 1);
  const float inverse = divided ? 1.0f / (sum_of(values) + kEpsilon) : 1.0f;
  const float common = divided ? dot * inverse * inverse : 0.0f;
  const bool of_all = options.pre_softmax || options.dense;

  over(count, [&](int64_t i, auto part) {
    const Ints routed = chosen(i, part);
    const Floats g = routed ? load<Format>(grad + i, part) * scaling : zero;
    const Floats x = load<F32>(saved + i, part);
    Floats slope;
    if constexpr (kScore == Score::kSoftmax) {
      slope = (g - dot) * x;
      if (!of_all) slope = routed ? slope : zero;
    } else {
      slope = routed ? g * inverse - common : zero;
      if constexpr (kScore == Score::kSigmoid) {
        slope = slope * x * (1.0f - x);
      } else {
        slope *= sqrt_softplus_slope(x, sqrt_softplus(x));
      }
    }
    store<Format>(out + i, slope, part);
  });
}

// Of rows of [count, experts].
template <class Format>
void add_rows(const void* from, int64_t count, int64_t experts, float* sums) {
  const auto* row = static_cast<const typename Format::Type*>(from);
  for (; count >= 4; count -= 4, row += 4 * experts) {
    over(experts, [&](int64_t i, auto part) {
      const Floats low = load<Format>(row + i, part) + load<Format>(row + experts + i, part);
      const Floats high =
          load<Format>(row + 2 * experts + i, part) + load<Format>(row + 3 * experts + i, part);
      store<F32>(sums + i, load<F32>(sums + i, part) + (low + high), part);
    });
  }
  for (; count > 0; --count, row += experts) {
    over(experts, [&](int64_t i, auto part) {
      store<F32>(sums + i, load<F32>(sums + i, part) + load<Format>(row + i, part), part);
    });
  }
}

template <class Format>
void set(Table& table, int format) {
  table.forward[format] = forward<Format>;
  table.backward[format][0] = backward<Format, Score::kSigmoid>;
  table.backward[format][1] = backward<Format, Score::kSoftmax>;
  table.backward[format][2] = backward<Format, Score::kSqrtSoftplus>;
  table.add_rows[format] = add_rows<Format>;
}

}  // namespace

const Table& make_table() {
  static const Table table = [] {
    Table made{};
    set<F32>(made, 0);
    set<BF16>(made, 1);
    set<F16>(made, 2);
    return made;
  }();
  return table;
}

}  // namespace jaxtap::router::JAXTAP_ISA_NAMESPACE
