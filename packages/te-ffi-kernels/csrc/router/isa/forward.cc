// The choice of experts for a token.

#include "router/isa/scores.h"
#include "router/isa/select.h"
#include "router/isa/table.h"

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

}  // namespace

void set_forward(Table& table) {
  table.forward[0] = forward<F32>;
  table.forward[1] = forward<BF16>;
  table.forward[2] = forward<F16>;
}

}  // namespace jaxtap::router::JAXTAP_ISA_NAMESPACE
