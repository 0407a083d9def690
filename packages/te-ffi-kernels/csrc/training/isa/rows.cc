// Magnitudes, random bits and rounding to int8. Equal bit for bit for all instruction sets.

#include <type_traits>
#include <utility>

#include "common/lanes_math.h"
#include "training/table.h"

namespace jaxtap::training::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

template <bool kEach, class Where>
JAXTAP_INLINE Floats number_of(const float* each, int64_t i, float all_of_them, Where where) {
  if constexpr (kEach) return read<Floats>(each + i, where);
  return all(all_of_them);
}

// Calls body(has_factors), a compile-time constant.
template <class Body>
JAXTAP_INLINE void with_factors(const Line& line, const Body& body) {
  if (line.factors != nullptr) {
    body(std::true_type());
  } else {
    body(std::false_type());
  }
}

template <class Format, bool kEach, class Where>
JAXTAP_INLINE Ints magnitude(const typename Format::Type* x, int64_t i, const Line& line,
                             Where where) {
  const Floats number = load<Format>(x + i, where);
  const Floats factor = number_of<kEach>(line.factors, i, line.factor, where);
  return same_bits<Ints>(number * factor) & 0x7fffffff;
}

JAXTAP_INLINE Ints larger_bits(Ints a, Ints b) {
#if defined(__AVX512F__)
  return same_bits<Ints>(_mm512_max_epi32(same_bits<__m512i>(a), same_bits<__m512i>(b)));
#else
  return a > b ? a : b;
#endif
}

template <class Format>
int32_t absmax(const void* from, int64_t count, const Line& line) {
  const auto* x = static_cast<const typename Format::Type*>(from);
  Ints most{}, most2{};
  with_factors(line, [&](auto has) {
    constexpr bool kEach = decltype(has)::value;
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      most = larger_bits(most, magnitude<Format, kEach>(x, i, line, Whole()));
      most2 = larger_bits(most2, magnitude<Format, kEach>(x, i + kLanes, line, Whole()));
    }
    for (; i + kLanes <= count; i += kLanes) {
      most = larger_bits(most, magnitude<Format, kEach>(x, i, line, Whole()));
    }
    if (i < count) {
      // Lanes beyond the row may hold anything: zero times an infinite factor.
      const Ints last = magnitude<Format, kEach>(x, i, line, Part{count - i});
      most2 = larger_bits(most2, iota() < static_cast<int32_t>(count - i) ? last : Ints{});
    }
  });
  most = larger_bits(most, most2);
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found = most[i] > found ? most[i] : found;
  return found;
}

template <class Format>
void absmax_each(const void* from, int64_t count, const Line& line, int32_t* most) {
  const auto* x = static_cast<const typename Format::Type*>(from);
  over(count, [&](int64_t i, auto where) {
    const Ints found = magnitude<Format, false>(x, i, line, where);
    write(most + i, larger_bits(read<Ints>(most + i, where), found), where);
  });
}

template <class Format, bool kFactors, bool kInverses, bool kNoise>
void quantize_line(const typename Format::Type* x, int64_t count, const Line& line, int8_t* out) {
  // 1.5 * 2^23: a sum with it is rounded to whole numbers, half to even, and has them in its low
  // bits.
  constexpr float kRound = 12582912.0f;
  constexpr int32_t kBits = 0x4b400000;
  over(count, [&](int64_t i, auto where) {
    const Floats number =
        load<Format>(x + i, where) * number_of<kFactors>(line.factors, i, line.factor, where);
    const Floats steps = number * number_of<kInverses>(line.inverses, i, line.inverse, where) +
                         number_of<kNoise>(line.noise, i, line.noise_of_all, where);
    const Floats cut = max(all(-127.0f), min(all(127.0f), steps));
    const Ints whole = same_bits<Ints>(cut + kRound) - kBits;
    write(out + i, low_bytes(steps == steps ? whole : Ints{}), where);
  });
}

template <class Format>
void quantize(const void* from, int64_t count, const Line& line, int8_t* out) {
  const auto* x = static_cast<const typename Format::Type*>(from);
  if (line.inverses != nullptr) {
    if (line.noise != nullptr) return quantize_line<Format, false, true, true>(x, count, line, out);
    return quantize_line<Format, false, true, false>(x, count, line, out);
  }
  with_factors(line, [&](auto has) {
    constexpr bool kFactors = decltype(has)::value;
    if (line.noise != nullptr) {
      quantize_line<Format, kFactors, false, true>(x, count, line, out);
    } else {
      quantize_line<Format, kFactors, false, false>(x, count, line, out);
    }
  });
}

// Vectors that are drawn side by side, since a round waits for the one before.
constexpr int kSide = 4;
using Side = std::make_integer_sequence<int, kSide>;

template <int kRotation, int... kI>
JAXTAP_INLINE void mix(Words* x, Words* y, std::integer_sequence<int, kI...>) {
  ((x[kI] += y[kI]), ...);
  ((y[kI] = ((y[kI] << kRotation) | (y[kI] >> (32 - kRotation))) ^ x[kI]), ...);
}

template <int... kRotations>
JAXTAP_INLINE void rounds(Words* x, Words* y) {
  (mix<kRotations>(x, y, Side()), ...);
}

template <int... kI>
JAXTAP_INLINE void add_keys(Words* x, Words* y, uint32_t first, uint32_t second,
                            std::integer_sequence<int, kI...>) {
  ((x[kI] += first), ...);
  ((y[kI] += second), ...);
}

// Threefry 2x32-20 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
JAXTAP_INLINE void threefry(Words* x, Words* y, const uint32_t* key) {
  const uint32_t k0 = key[0], k1 = key[1], k2 = k0 ^ k1 ^ 0x1BD11BDAu;
  add_keys(x, y, k0, k1, Side());
  rounds<13, 15, 26, 6>(x, y);
  add_keys(x, y, k1, k2 + 1u, Side());
  rounds<17, 29, 16, 24>(x, y);
  add_keys(x, y, k2, k0 + 2u, Side());
  rounds<13, 15, 26, 6>(x, y);
  add_keys(x, y, k0, k1 + 3u, Side());
  rounds<17, 29, 16, 24>(x, y);
  add_keys(x, y, k1, k2 + 4u, Side());
  rounds<13, 15, 26, 6>(x, y);
  add_keys(x, y, k2, k0 + 5u, Side());
}

JAXTAP_INLINE Floats noise_of(Noise noise, Words bits) {
  if (noise == Noise::kUniform) {
    // Exactly -1/2 would move a number that needs no rounding.
    const Ints high = same_bits<Ints>(bits >> 9);
    return max(__builtin_convertvector(high, Floats) * 0x1p-23f - 0.5f, all(-0.5f + 0x1p-24f));
  }
  const Ints low = same_bits<Ints>(bits & 0xffu);
  return (__builtin_convertvector(low, Floats) + 0.5f) * 0x1p-8f - 0.5f;
}

template <int... kI>
JAXTAP_INLINE void draw_side(Noise noise, const uint32_t* key, uint32_t first, float* out,
                             std::integer_sequence<int, kI...>) {
  Words x[kSide] = {}, y[kSide];
  const Words lanes = same_bits<Words>(iota());
  ((y[kI] = lanes + (first + static_cast<uint32_t>(kI * kLanes))), ...);
  threefry(x, y, key);
  (write(out + kI * kLanes, noise_of(noise, x[kI] ^ y[kI])), ...);
}

void draw(Noise noise, const uint32_t* key, uint32_t first, int64_t count, float* out) {
  static_assert(kDrawn % (kSide * kLanes) == 0, "whole rounds fill what is drawn at most");
  for (int64_t done = 0; done < count; done += kSide * kLanes) {
    draw_side(noise, key, first + static_cast<uint32_t>(done), out + done, Side());
  }
}

}  // namespace

const Table& make_table() {
  static const Table table = {
      {absmax<F32>, absmax<BF16>, absmax<F16>},
      {absmax_each<F32>, absmax_each<BF16>, absmax_each<F16>},
      {quantize<F32>, quantize<BF16>, quantize<F16>},
      draw,
  };
  return table;
}

}  // namespace jaxtap::training::JAXTAP_ISA_NAMESPACE
