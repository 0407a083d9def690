// Softmax of a row, and its gradient. The row is in a cache after its maximum was sought.

#include "common/lanes_math.h"
#include "softmax/table.h"

namespace jaxtap::softmax::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

constexpr float kNone = -__builtin_inff();
constexpr int64_t kBlock = 1024;  // numbers that are added up at a time

// Scaled logits from a position on; those that are left out are -infinity.
template <class Format, bool kMasked>
struct Logits {
  const typename Format::Type* x;
  const uint8_t* mask;
  float scale;

  JAXTAP_INLINE Floats apply(Floats scaled, Bytes bytes) {
    return widen(bytes) == 1 ? all(kNone) : scaled;
  }

  inline __attribute__((always_inline)) Floats at(int64_t i) const {
    const Floats scaled = load<Format>(x + i) * scale;
    if constexpr (kMasked) return apply(scaled, read<Bytes>(mask + i));
    return scaled;
  }

  inline __attribute__((always_inline)) Floats part(int64_t i, int64_t count) const {
    const Floats scaled = first_n(load<Format>(x + i, Part{count}) * scale, count, kNone);
    if constexpr (kMasked) return apply(scaled, read<Bytes>(mask + i, Part{count}));
    return scaled;
  }
};

template <class Logits>
JAXTAP_INLINE float maximum(const Logits& logits, int64_t count) {
  Floats a = all(kNone), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    a = max(logits.at(i), a);
    b = max(logits.at(i + kLanes), b);
    c = max(logits.at(i + 2 * kLanes), c);
    d = max(logits.at(i + 3 * kLanes), d);
  }
  for (; i + kLanes <= count; i += kLanes) a = max(logits.at(i), a);
  if (i < count) b = max(logits.part(i, count - i), b);
  return largest_of(max(max(a, b), max(c, d)));
}

template <class Format, bool kMasked>
void forward(const void* from, const uint8_t* mask, void* to, float* scratch, int64_t count,
             float scale) {
  using Type = typename Format::Type;
  constexpr bool kInPlace = sizeof(Type) == sizeof(float);
  auto* out = static_cast<Type*>(to);
  float* row = kInPlace ? static_cast<float*>(to) : scratch;
  const Logits<Format, kMasked> logits{static_cast<const Type*>(from), mask, scale};
  const float most = maximum(logits, count);
  Floats sums = all(0.0f);
  int64_t i = 0;
  while (i < count) {
    // In blocks, so that what is added isn't small beside what it's added to.
    const int64_t end = count - i > kBlock ? i + kBlock : count;
    Floats a = all(0.0f), b = a;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      const Floats first = exp(logits.at(i) - most);
      const Floats second = exp(logits.at(i + kLanes) - most);
      write(row + i, first);
      write(row + i + kLanes, second);
      a += first;
      b += second;
    }
    for (; i + kLanes <= end; i += kLanes) {
      const Floats e = exp(logits.at(i) - most);
      write(row + i, e);
      a += e;
    }
    if (i < end) {
      const Floats e = exp(logits.part(i, end - i) - most);
      write(row + i, e, Part{end - i});
      b += first_n(e, end - i, 0.0f);
      i = end;
    }
    sums += a + b;
  }
  const float sum = sum_of(sums);
  if (kMasked && !(sum > 0.0f)) {  // NaN: everything is left out, or something isn't finite
    for (i = 0; i < count; ++i) row[i] = mask[i] == 1 ? 0.0f : sum;
  }
  const float inverse = kMasked && !(sum > 0.0f) ? 1.0f : 1.0f / sum;
  for (i = 0; i + kLanes <= count; i += kLanes) {
    store<Format>(out + i, read<Floats>(row + i) * inverse);
  }
  if (i < count) {
    const Part rest{count - i};
    store<Format>(out + i, read<Floats>(row + i, rest) * inverse, rest);
  }
}

template <class Format>
void backward(const void* grads, const void* results, void* to, int64_t count, float scale) {
  using Type = typename Format::Type;
  const auto* grad = static_cast<const Type*>(grads);
  const auto* softmax = static_cast<const Type*>(results);
  auto* out = static_cast<Type*>(to);
  const auto product = [&](int64_t i) { return load<Format>(grad + i) * load<Format>(softmax + i); };
  Floats sums = all(0.0f);
  int64_t i = 0;
  while (i < count) {
    const int64_t end = count - i > kBlock ? i + kBlock : count;
    Floats a = all(0.0f), b = a, c = a, d = a;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      a += product(i);
      b += product(i + kLanes);
      c += product(i + 2 * kLanes);
      d += product(i + 3 * kLanes);
    }
    for (; i + kLanes <= end; i += kLanes) a += product(i);
    if (i < end) {
      const Part rest{end - i};
      b += load<Format>(grad + i, rest) * load<Format>(softmax + i, rest);
      i = end;
    }
    sums += (a + b) + (c + d);
  }
  const float sum = sum_of(sums);
  for (i = 0; i + kLanes <= count; i += kLanes) {
    const Floats y = load<Format>(softmax + i);
    store<Format>(out + i, (load<Format>(grad + i) - sum) * y * scale);
  }
  if (i < count) {
    const Part rest{count - i};
    const Floats y = load<Format>(softmax + i, rest), dz = load<Format>(grad + i, rest);
    store<Format>(out + i, (dz - sum) * y * scale, rest);
  }
}

}  // namespace

const Table& make_table() {
  static const Table table = {
      {{forward<F32, false>, forward<F32, true>},
       {forward<BF16, false>, forward<BF16, true>},
       {forward<F16, false>, forward<F16, true>}},
      {backward<F32>, backward<BF16>, backward<F16>},
  };
  return table;
}

}  // namespace jaxtap::softmax::JAXTAP_ISA_NAMESPACE
