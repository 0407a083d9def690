// The k largest of n numbers: those that reach a lower bound of the k-th are gathered, and ranked.
#pragma once

#include "common/lanes_math.h"
#include "router/table.h"

namespace jaxtap::router::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

constexpr int32_t kLeast = INT32_MIN;  // below every number but one NaN
constexpr int64_t kCandidates = 64;

// Integers with the order of the floats' bits.
JAXTAP_INLINE Ints keys(Floats x) {
  const Ints bits = same_bits<Ints>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

JAXTAP_INLINE Ints keys_at(const float* scores, int64_t i, int64_t n) {
  if (i + kLanes <= n) return keys(read<Floats>(scores + i));
  const Ints found = keys(read<Floats>(scores + i, Part{n - i}));
  return iota() < static_cast<int32_t>(n - i) ? found : Ints{} + kLeast;
}

// The k-th largest of `count` numbers; `values` goes on with kLeast to the end of a vector.
JAXTAP_INLINE int32_t kth(const int32_t* values, int64_t count, int64_t k) {
  Ints least = Ints{} + INT32_MAX;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints mine = read<Ints>(values + i);
    Ints above = {};
    for (int64_t j = 0; j < count; ++j) above -= (Ints{} + values[j]) > mine;
    const Ints among = above < static_cast<int32_t>(k) ? mine : Ints{} + INT32_MAX;
    least = among < least ? among : least;
  }
#if defined(__AVX512F__)
  return _mm512_reduce_min_epi32(same_bits<__m512i>(least));
#elif defined(JAXTAP_NEON)
  return vminvq_s32(same_bits<int32x4_t>(least));
#else
  int32_t found = least[0];
  for (int i = 1; i < kLanes; ++i) found = least[i] < found ? least[i] : found;
  return found;
#endif
}

// Appends the keys that aren't below `bound`, and where they are.
JAXTAP_INLINE int64_t gather(Ints key, int64_t at, int32_t bound, int32_t* found, int32_t* where,
                             int64_t count) {
#if defined(__AVX512F__)
  const __m512i key_bits = same_bits<__m512i>(key);
  const __mmask16 mask = _mm512_cmpge_epi32_mask(key_bits, _mm512_set1_epi32(bound));
  const Ints index = iota() + static_cast<int32_t>(at);
  _mm512_storeu_si512(found + count, _mm512_maskz_compress_epi32(mask, key_bits));
  _mm512_storeu_si512(where + count,
                      _mm512_maskz_compress_epi32(mask, same_bits<__m512i>(index)));
  return count + __builtin_popcount(mask);
#else
  int32_t lanes[kLanes];
  write(lanes, key);
  for (int i = 0; i < kLanes; ++i) {
    found[count] = lanes[i];
    where[count] = static_cast<int32_t>(at) + i;
    count += lanes[i] >= bound;
  }
  return count;
#endif
}

// Of kSlots places, that each number has one of in turn, the k-th largest maximum is a bound: k
// numbers reach it. Tells whether few enough do.
template <int kSlots>
bool select_few(const float* scores, int64_t n, int64_t k, int32_t* chosen) {
  constexpr int kVectors = kSlots / kLanes;
  Ints best[kVectors];
  for (int v = 0; v < kVectors; ++v) best[v] = Ints{} + kLeast;
  int64_t i = 0;
  for (; i + kSlots <= n; i += kSlots) {
    for (int v = 0; v < kVectors; ++v) {
      const Ints key = keys(read<Floats>(scores + i + v * kLanes));
      best[v] = key > best[v] ? key : best[v];
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    if (i + v * kLanes >= n) break;
    const Ints key = keys_at(scores, i + v * kLanes, n);
    best[v] = key > best[v] ? key : best[v];
  }
  int32_t slots[kSlots];
  for (int v = 0; v < kVectors; ++v) write(slots + v * kLanes, best[v]);
  const int32_t bound = kth(slots, kSlots, k);

  int32_t found[kCandidates + kLanes], where[kCandidates + kLanes];
  int64_t count = 0;
  for (i = 0; i < n; i += kLanes) {
    count = gather(keys_at(scores, i, n), i, bound, found, where, count);
    if (count > kCandidates) return false;
  }
  write(found + count, Ints{} + kLeast);
  const int32_t last = kth(found, count, k);
  int64_t ties = k;
  for (i = 0; i < count; ++i) ties -= found[i] > last;
  // One more may be written than there are, over which the next goes.
  for (i = 0; i < count; ++i) {
    const bool tie = found[i] == last;
    *chosen = where[i];
    chosen += (found[i] > last) | (tie & (ties > 0));
    ties -= tie;
  }
  return true;
}

// The sum of the k largest, for a few numbers.
template <int kSlots>
JAXTAP_INLINE float sum_of_few(const float* scores, int64_t n, int64_t k) {
  int32_t slots[kSlots];
  for (int64_t i = 0; i < kSlots; i += kLanes) {
    write(slots + i, i < n ? keys_at(scores, i, n) : Ints{} + kLeast);
  }
  const int32_t last = kth(slots, kSlots, k);
  const int32_t bits = last ^ ((last >> 31) & 0x7fffffff);
  Floats sums = all(0.0f), above = sums;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Ints mine = read<Ints>(slots + i) > last;
    const bool whole = i + kLanes <= n;
    const Floats x = whole ? read<Floats>(scores + i) : read<Floats>(scores + i, Part{n - i});
    sums += mine ? x : all(0.0f);
    above += mine ? all(1.0f) : all(0.0f);
  }
  const float ties = static_cast<float>(k) - sum_of(above);  // at least one
  return sum_of(sums) + ties * bits_float(static_cast<uint32_t>(bits));
}

// The indices of the k largest, ascending; `chosen` has room for one more. Of equal numbers those
// with the lower index.
JAXTAP_INLINE void select(const float* scores, int64_t n, int64_t k, int32_t* chosen) {
  const bool done = k <= 8    ? select_few<16>(scores, n, k, chosen)
                    : k <= 16 ? select_few<32>(scores, n, k, chosen)
                    : k <= 32 && select_few<64>(scores, n, k, chosen);
  if (!done) select_any(scores, n, k, chosen);
}

}  // namespace
}  // namespace jaxtap::router::JAXTAP_ISA_NAMESPACE
