// Depthwise convolutions of rows of images, and results as int8. Sums are of whole numbers: in int32
// with instructions that multiply int8, else in float32, which holds them, so that a fused
// multiply-add gives the same bits as two operations.

#include <algorithm>
#include <limits>
#include <type_traits>

#include "common/lanes_math.h"
#include "convolution/table.h"

namespace jaxtap::convolution::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

// What a word of an image and of a weight has, and how both are multiplied.
#if defined(__AVX512VNNI__) || defined(JAXTAP_NEON)

constexpr int kTaps = 4;
using Sums = Ints;
constexpr int kSpreadBlocks = 4;  // of channels at once: with AVX-512 what a line of the cache has

// One value of each channel, and two and four of pixels that follow each other.
#if defined(__AVX512VNNI__)

using Values = Words;
using Pairs = Words;
JAXTAP_INLINE Values values_of(Bytes x) { return same_bits<Words>(widen(x)); }
JAXTAP_INLINE Pairs pairs_of(Values low, Values high) { return low | (high << 8); }
JAXTAP_INLINE Words word_of(Pairs low, Pairs high) { return (low | (high << 16)) ^ 0x80808080u; }

constexpr int32_t kMore = 128;  // what was added to values of images, which are unsigned in a product

JAXTAP_INLINE Words arranged(Words weight) { return weight; }

// As assembly, since gcc 12 copies sums from register to register around the intrinsic.
JAXTAP_INLINE void add_products(Words x, Words weight, Sums& sum) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
}

#else

using Values = uint8x8_t;  // the first half alone
using Pairs = uint8x8_t;
JAXTAP_INLINE Values values_of(Bytes x) { return vcreate_u8(same_bits<uint32_t>(x)); }
JAXTAP_INLINE Pairs pairs_of(Values low, Values high) { return vzip1_u8(low, high); }

constexpr int32_t kMore = 0;  // both factors are signed

#if defined(__ARM_FEATURE_DOTPROD)

JAXTAP_INLINE Words word_of(Pairs low, Pairs high) {
  const uint16x4_t first = vreinterpret_u16_u8(low), second = vreinterpret_u16_u8(high);
  return same_bits<Words>(vcombine_u16(vzip1_u16(first, second), vzip2_u16(first, second)));
}

JAXTAP_INLINE Words arranged(Words weight) { return weight; }

JAXTAP_INLINE void add_products(Words x, Words weight, Sums& sum) {
  sum = same_bits<Sums>(vdotq_s32(same_bits<int32x4_t>(sum), same_bits<int8x16_t>(x),
                                  same_bits<int8x16_t>(weight)));
}

#else

// Without SDOT products are int16, of which neighbours are added to each sum. So the first pairs of
// all channels lie in one half of a vector, and the second ones in the other.
JAXTAP_INLINE Words word_of(Pairs low, Pairs high) {
  return same_bits<Words>(vcombine_u8(low, high));
}

JAXTAP_INLINE Words arranged(Words weight) {
  const auto pairs = same_bits<uint16x8_t>(weight);
  const uint64x2_t first = vreinterpretq_u64_u16(vuzp1q_u16(pairs, pairs));
  const uint64x2_t second = vreinterpretq_u64_u16(vuzp2q_u16(pairs, pairs));
  return same_bits<Words>(vzip1q_u64(first, second));
}

// Each product is added on its own: int16 doesn't hold two of -128 * -128.
JAXTAP_INLINE void add_products(Words x, Words weight, Sums& sum) {
  const auto a = same_bits<int8x16_t>(x), b = same_bits<int8x16_t>(weight);
  int32x4_t sums = same_bits<int32x4_t>(sum);
  sums = vpadalq_s16(sums, vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  sum = same_bits<Sums>(vpadalq_s16(sums, vmull_high_s8(a, b)));
}

#endif
#endif

// Words for each `kStep` pixels, `count` in all, of some blocks of channels: `next` gives the values
// of a pixel after the other, `store` takes the words of the i-th. What neighbours share is put
// together once.
template <int kStep, int kBlocks, class Next, class Store>
JAXTAP_INLINE void words_of(int64_t count, const Next& next, const Store& store) {
  struct AllValues {
    Values of[kBlocks];
  };
  struct AllPairs {
    Pairs of[kBlocks];
  };
  const auto values = [&]() __attribute__((always_inline)) {
    AllValues made;
    const auto where = next();
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) made.of[b] = values_of(where(b));
    return made;
  };
  const auto pairs = [](const AllValues& low, const AllValues& high) __attribute__((always_inline)) {
    AllPairs made;
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) made.of[b] = pairs_of(low.of[b], high.of[b]);
    return made;
  };
  const auto put = [&](int64_t i, const AllPairs& low, const AllPairs& high)
      __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) store(i, b, word_of(low.of[b], high.of[b]));
  };
  if constexpr (kStep == 1) {
    const AllValues one = values(), two = values();
    AllValues last = values();
    AllPairs first = pairs(one, two), second = pairs(two, last);
    for (int64_t i = 0; i < count; ++i) {
      const AllValues more = values();
      const AllPairs third = pairs(last, more);
      put(i, first, third);
      first = second;
      second = third;
      last = more;
    }
  } else {
    AllPairs first{};
    if (kStep == 2) {
      const AllValues low = values();
      first = pairs(low, values());
    }
    for (int64_t i = 0; i < count; ++i) {
      if (kStep == 4) {
        const AllValues low = values();
        first = pairs(low, values());
      }
      const AllValues low = values();
      const AllPairs second = pairs(low, values());
      put(i, first, second);
      first = second;
    }
  }
}

#else

constexpr int kTaps = 1;
using Sums = Floats;
constexpr int kSpreadBlocks = 1;
constexpr int32_t kMore = 0;

JAXTAP_INLINE Words arranged(Words weight) { return weight; }

template <int kStep, int kBlocks, class Next, class Store>
JAXTAP_INLINE void words_of(int64_t count, const Next& next, const Store& store) {
  static_assert(kStep == 1 && kBlocks == 1, "each pixel has a word");
  for (int64_t i = 0; i < count; ++i) {
    const Bytes x = next()(0);
#if defined(__AVX2__)
    const __m128i low = _mm_cvtsi64_si128(same_bits<int64_t>(x));
    store(i, 0, same_bits<Words>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low))));
#else
    const Ints wide = (widen(x) << 24) >> 24;  // with their signs
    store(i, 0, same_bits<Words>(__builtin_convertvector(wide, Floats)));
#endif
  }
}

JAXTAP_INLINE void add_products(Words x, Words weight, Sums& sum) {
  sum = fma(same_bits<Floats>(x), same_bits<Floats>(weight), sum);
}

JAXTAP_INLINE Floats to_floats(Floats sum) { return sum; }

#endif

JAXTAP_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

template <class Format>
constexpr int kBitsOf = 8 * sizeof(typename Format::Type);

// Beyond this distance from a whole number a quotient may round otherwise than the product with the
// reciprocal, as in matmul/rows.inl.
constexpr float kSafeRounding = 0.49997f;

// The larger of two magnitudes, as their bits, of which those of a NaN are the largest.
JAXTAP_INLINE Words larger(Words most, Floats x) {
  const Words bits = same_bits<Words>(x) & 0x7fffffffu;
#if defined(__AVX512F__)
  return same_bits<Words>(_mm512_max_epu32(same_bits<__m512i>(most), same_bits<__m512i>(bits)));
#elif defined(__AVX2__)
  return same_bits<Words>(_mm256_max_epu32(same_bits<__m256i>(most), same_bits<__m256i>(bits)));
#elif defined(JAXTAP_NEON)
  return same_bits<Words>(vmaxq_u32(same_bits<uint32x4_t>(most), same_bits<uint32x4_t>(bits)));
#else
  return bits > most ? bits : most;
#endif
}

// Whether any magnitude is beyond its bound; that of a NaN is.
JAXTAP_INLINE bool any_beyond(Words most, Floats bound) {
  const Ints holds = same_bits<Ints>(most) > same_bits<Ints>(bound);
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(same_bits<__m512i>(holds)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(same_bits<__m256>(holds)) != 0;
#elif defined(JAXTAP_NEON)
  return vminvq_s32(same_bits<int32x4_t>(holds)) != 0;
#else
  bool found = false;
  for (int i = 0; i < kLanes; ++i) found |= holds[i] != 0;
  return found;
#endif
}

// The larger, or smaller, of a bound and a number; the number where both are equal or it is NaN.
JAXTAP_INLINE Floats at_least(float least, Floats y) {
#if defined(__AVX512F__)
  return same_bits<Floats>(_mm512_max_ps(_mm512_set1_ps(least), same_bits<__m512>(y)));
#elif defined(__AVX2__)
  return same_bits<Floats>(_mm256_max_ps(_mm256_set1_ps(least), same_bits<__m256>(y)));
#else
  return y < least ? all(least) : y;
#endif
}

JAXTAP_INLINE Floats at_most(float most, Floats y) {
#if defined(__AVX512F__)
  return same_bits<Floats>(_mm512_min_ps(_mm512_set1_ps(most), same_bits<__m512>(y)));
#elif defined(__AVX2__)
  return same_bits<Floats>(_mm256_min_ps(_mm256_set1_ps(most), same_bits<__m256>(y)));
#else
  return y > most ? all(most) : y;
#endif
}

// What is beyond 127 saturates; a NaN stays.
JAXTAP_INLINE Floats cut(Floats x) { return at_least(-127.0f, at_most(127.0f, x)); }

// The nearest whole number, half to even, of magnitudes up to 128.
JAXTAP_INLINE Ints nearest(Floats x) {
#if defined(__AVX512F__)
  return same_bits<Ints>(_mm512_cvtps_epi32(same_bits<__m512>(x)));
#elif defined(__AVX2__)
  return same_bits<Ints>(_mm256_cvtps_epi32(same_bits<__m256>(x)));
#else
  return __builtin_convertvector((x + 0x1.8p23f) - 0x1.8p23f, Ints);
#endif
}

// How far a finite number is from the nearest whole one.
JAXTAP_INLINE Floats from_whole(Floats x, [[maybe_unused]] Ints near) {
#if defined(__AVX512F__)
  return same_bits<Floats>(_mm512_reduce_ps(same_bits<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#else
  return x - to_floats(near);
#endif
}

// Quotients instead of products, and 0 for a NaN.
__attribute__((noinline, cold)) void divide(const Floats* x, int count, float divisor, Ints* to) {
  for (int i = 0; i < count; ++i) {
    const Floats ratio = x[i] / divisor;
    to[i] = nearest(cut(ratio == ratio ? ratio : all(0.0f)));
  }
}

// Whole numbers of magnitudes up to 127 to bytes.
template <class Where>
JAXTAP_INLINE void write_bytes(int8_t* to, Ints x, Where where) {
  write(to, low_bytes(x), where);
}

// The quantized values of several vectors: what is asked of one of them is asked of all. kCuts: there
// may be some beyond 127.
template <bool kCuts, int kCount>
JAXTAP_INLINE void quantize(const Floats (&x)[kCount], Scale scale, Ints (&near)[kCount]) {
  Words most{};
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    Floats ratio = x[i] * scale.reciprocal;
    if (kCuts) ratio = cut(ratio);
    near[i] = nearest(ratio);
    most = larger(most, ratio - to_floats(near[i]));
  }
  if (__builtin_expect(any_beyond(most, all(kSafeRounding)), 0)) {
    Floats ratios[kCount];  // what is in memory here alone stays in registers elsewhere
    Ints found[kCount];
    std::copy_n(x, kCount, ratios);
    divide(ratios, kCount, scale.divisor, found);
    std::copy_n(found, kCount, near);
  }
}

// What the results of a vector of channels have in common. Where they go as int8, what is not there
// is 0, or without end, and bounds are those of int8 too: beyond 127.4 the nearest value is 127.
struct Channels {
  Floats scale, bias;
  float least, most;
};

// The same for results as int8 in one step, sum * factor + addend, instead of four that are rounded
// each. Where that is not farther than `safe` from a whole number, both are nearest to the same.
struct Nearly {
  Floats factor, addend, safe;
  float least, most;
};

JAXTAP_INLINE Floats magnitude(Floats x) {
  return same_bits<Floats>(same_bits<Words>(x) & 0x7fffffffu);
}

// With u = 2^-24, p the product of a sum and both scales, b the bias, and all of them in multiples of
// the scale of results: the four steps are off by at most u (2 |p| + |p + b|), the one by
// u (4 |p| + 2 |b| + |p + b|), and |p| <= 128 + |b| where results are not cut. Together that is less
// than u (1024 + 8 |b|). It does not hold where a scale or a product of scales is so large or small
// that a step leaves the range of normal numbers, or where anything is NaN: then nothing is safe.
JAXTAP_INLINE Nearly nearly_of(const Results& to, const Channels& of) {
  // Times a sum, which is less than 2^31, it is still a normal number.
  const auto within = [](Floats x) { return (magnitude(x) > 0x1p-96f) & (magnitude(x) < 0x1p96f); };
  const float reciprocal = to.y_scale.reciprocal;
  const Floats scale = of.scale * to.x_scale, factor = scale * reciprocal;
  const Floats addend = of.bias * reciprocal, beyond = magnitude(addend);
  const Ints are_within = within(all(to.x_scale)) & within(all(reciprocal)) &
                          ((within(scale) & within(factor)) | (of.scale == 0.0f));
  const Floats safe = are_within & (beyond < 0x1p20f)
                          ? 0.5f - (0x1p-14f + 0x1p-21f * beyond)
                          : all(-1.0f);
  return {factor, addend, safe, of.least * reciprocal, of.most * reciprocal};
}

template <class Format, bool kToInt8, class Where>
JAXTAP_INLINE Channels channels_of(const Results& to, int64_t channel, Where where) {
  const Output& out = to.out;
  // Vectors have at most the 16 channels that scales are together for.
  const uint8_t* scales = to.scales + channel / 16 * to.scales_stride + channel % 16 * 4;
  Channels of{read<Floats>(reinterpret_cast<const float*>(scales), where), Floats{}, out.least,
              out.most};
  if (out.bias != nullptr) {
    const auto* bias = reinterpret_cast<const typename Format::Type*>(out.bias);
    of.bias = load<Format>(bias + channel, where);
  }
  if (kToInt8) {
    // What rounding to a format of fewer bits makes of a bound may be beyond it.
    constexpr bool kCuts = kBitsOf<Format> == 32;
    const float end = kCuts ? 127.4f * to.y_scale.divisor : std::numeric_limits<float>::infinity();
    of.least = out.clamps ? std::max(-end, std::min(out.least, end)) : -end;
    of.most = out.clamps ? std::max(-end, std::min(out.most, end)) : end;
  }
  return of;
}

// The quantized values of a vector of channels, of pixels that follow each other.
template <int kCount, class Where>
JAXTAP_INLINE void write_near(const Results& to, int64_t pixel, int64_t channel,
                              const Ints (&near)[kCount], Where where) {
  int8_t* bytes = to.qvalues + pixel * to.n + channel;
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) write_bytes(bytes + i * to.n, near[i], where);
}

// Results of sums, of pixels that follow each other, in the steps that they are defined by.
template <class Format, bool kToInt8, class Sum, int kCount, class Where>
JAXTAP_INLINE void put_exactly(const Results& to, const Channels& of, int64_t pixel, int64_t channel,
                               const Sum (&sums)[kCount], Where where) {
  using Type = typename Format::Type;
  const Output& out = to.out;
  Floats y[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    y[i] = to_floats(sums[i]) * to.x_scale * of.scale;
    if (kToInt8 || out.bias != nullptr) y[i] = rounded<Format>(y[i]) + of.bias;
  }
  if (out.residual != nullptr) {
    const uint8_t* from = out.residual + pixel * out.stride;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i, from += out.stride) {
      y[i] = rounded<Format>(y[i]) +
             load<Format>(reinterpret_cast<const Type*>(from) + channel, where);
    }
  }
  if (kToInt8 || out.clamps) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) y[i] = at_most(of.most, at_least(of.least, y[i]));
  }
  if constexpr (kToInt8) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) y[i] = rounded<Format>(y[i]);
    Ints near[kCount];
    quantize<kBitsOf<Format> != 32>(y, to.y_scale, near);
    write_near(to, pixel, channel, near, where);
  } else {
    uint8_t* row = out.y + pixel * out.stride;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i, row += out.stride) {
      store<Format>(reinterpret_cast<Type*>(row) + channel, y[i], where);
    }
  }
}

// The same for what `put` leaves to it. The vectors of a call are in memory here alone.
template <class Sum, int kCount, class Where>
__attribute__((noinline)) void put_rest(const Results& to, const Channels& of, int64_t pixel,
                                        int64_t channel, const Sum* sums, Where where) {
  Sum found[kCount];
  std::copy_n(sums, kCount, found);
  put_exactly<F32, true>(to, of, pixel, channel, found, where);
}

// Results of sums, of pixels that follow each other: where they are int8 of float32, in one step,
// unless one of them is not safe. Beside a residual, whose size is not known, none is. Generic C++
// has no instruction for it.
template <class Format, bool kToInt8, class Sum, int kCount, class Where>
JAXTAP_INLINE void put(const Results& to, const Channels& of, const Nearly& nearly, int64_t pixel,
                       int64_t channel, const Sum (&sums)[kCount], Where where) {
  if constexpr (kToInt8 && kBitsOf<Format> == 32 && !kGeneric) {
    if (to.out.residual == nullptr) {
      Ints near[kCount];
      Words most{};
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const Floats y = at_most(
            nearly.most,
            at_least(nearly.least, fma(to_floats(sums[i]), nearly.factor, nearly.addend)));
        near[i] = nearest(y);
        most = larger(most, from_whole(y, near[i]));
      }
      if (__builtin_expect(!any_beyond(most, nearly.safe), 1)) {
        return write_near(to, pixel, channel, near, where);
      }
    }
    Sum found[kCount];
    std::copy_n(sums, kCount, found);
    put_rest<Sum, kCount>(to, of, pixel, channel, found, where);
  } else {
    put_exactly<Format, kToInt8>(to, of, pixel, channel, sums, where);
  }
}

// All pixels, as many at once as registers hold: calls body(pixel, std::integral_constant).
template <class Body>
JAXTAP_INLINE void over_pixels(int64_t pixels, const Body& body) {
  int64_t pixel = 0;
  if constexpr (kGeneric) {  // where several at once would be 1 MB of code
    for (; pixel < pixels; ++pixel) body(pixel, std::integral_constant<int, 1>());
  } else if (pixels % 7 == 0 && pixels % 8 != 0) {  // lines of images are often so long
    for (; pixel < pixels; pixel += 7) body(pixel, std::integral_constant<int, 7>());
  } else {
    for (; pixel + 8 <= pixels; pixel += 8) body(pixel, std::integral_constant<int, 8>());
    if (pixel + 4 <= pixels) {
      body(pixel, std::integral_constant<int, 4>());
      pixel += 4;
    }
    if (pixel + 2 <= pixels) {
      body(pixel, std::integral_constant<int, 2>());
      pixel += 2;
    }
    if (pixel < pixels) body(pixel, std::integral_constant<int, 1>());
  }
}

template <class Format, bool kToInt8>
void put_rows(const Depthwise& given) {
  const Depthwise d = given;  // a copy: nothing to read again after results are stored
  const int64_t step = d.stride * kLanes;
  over(d.to.out.columns, [&](int64_t channel, auto where) {
    const Channels of = channels_of<Format, kToInt8>(d.to, channel, where);
    const Nearly nearly = kToInt8 ? nearly_of(d.to, of) : Nearly();
    const Sums start = kTaps == 1 ? Sums{} : read<Sums>(d.starts + channel, where);
    over_pixels(d.to.pixels, [&](int64_t pixel, auto count) {
      constexpr int kCount = decltype(count)::value;
      Sums sums[kCount];
      for (Sums& one : sums) one = start;
      const uint32_t* x = d.x + channel * d.line + pixel * step;
      const uint32_t* weights = d.weights + channel;
      // Each word of the weight is loaded once for all pixels.
      for (int64_t tap = 0; tap < d.tap_count; ++tap, weights += d.to.n) {
        const Words weight = arranged(read<Words>(weights, where));
        const uint32_t* at = x + d.taps[tap] * kLanes;
#pragma GCC unroll 8
        for (int i = 0; i < kCount; ++i) add_products(read<Words>(at + i * step), weight, sums[i]);
      }
      put<Format, kToInt8>(d.to, of, nearly, pixel, channel, sums, where);
    });
  });
}

template <class Format, bool kToInt8>
void put_rows(const Finished& given) {
  const Finished f = given;
  over(f.to.out.columns, [&](int64_t channel, auto where) {
    const Channels of = channels_of<Format, kToInt8>(f.to, channel, where);
    const Nearly nearly = kToInt8 ? nearly_of(f.to, of) : Nearly();
    over_pixels(f.to.pixels, [&](int64_t pixel, auto count) {
      constexpr int kCount = decltype(count)::value;
      Ints sums[kCount];
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        sums[i] = read<Ints>(f.sums + (pixel + i) * f.stride + channel);  // lines are of 16 columns
      }
      put<Format, kToInt8>(f.to, of, nearly, pixel, channel, sums, where);
    });
  });
}

// Some blocks of channels from one on.
template <int kStep, int kBlocks, class Where>
JAXTAP_INLINE void spread_blocks(const Spread& s, int64_t channel, Where where) {
  static constexpr int8_t kZeros[kBlocks * kLanes] = {};
  const int64_t dilation = kTaps == 1 ? 1 : s.dilation;
  // Pixels of one word are `dilation` apart, as it is from the word that begins with the second.
  for (int64_t i = 0; i < dilation; ++i) {
    int64_t place = i - s.first;
    const int8_t* x = s.x + channel;
    const auto next = [&]() __attribute__((always_inline)) {
      const bool is_inside = static_cast<uint64_t>(place) < static_cast<uint64_t>(s.inside);
      const int8_t* from = is_inside ? x + place * s.stride : kZeros;
      place += dilation;
      return [from, where](int block) __attribute__((always_inline)) {
        return read<Bytes>(from + block * kLanes, where);
      };
    };
    uint32_t* line = s.line + channel * s.pixels + i * kLanes;
    const auto store = [&](int64_t at, int block, Words word) __attribute__((always_inline)) {
      write(line + (block * s.pixels + at * dilation) * kLanes, word);
    };
    words_of<kStep, kBlocks>((s.pixels - i + dilation - 1) / dilation, next, store);
  }
}

template <int kStep>
void spread_by(const Spread& given) {
  const Spread s = given;  // a copy: nothing to read again after words are stored
  int64_t first = 0;
  for (; first + kSpreadBlocks * kLanes <= s.channels; first += kSpreadBlocks * kLanes) {
    spread_blocks<kStep, kSpreadBlocks>(s, first, Whole());
  }
  if constexpr (kSpreadBlocks == 4) {
    if (first + 2 * kLanes <= s.channels) {
      spread_blocks<kStep, 2>(s, first, Whole());
      first += 2 * kLanes;
    }
  }
  over(s.channels - first, [&](int64_t channel, auto where) {
    spread_blocks<kStep, 1>(s, first + channel, where);
  });
}

void spread(const Spread& s) {
  if constexpr (kTaps == 4) {
    if (s.step == 2) return spread_by<2>(s);
    if (s.step == 4) return spread_by<4>(s);
  }
  spread_by<1>(s);
}

template <class Operands>
void put_all(const Operands& given) {
  const auto of = [&](auto format) {
    using Format = decltype(format);
    given.to.qvalues == nullptr ? put_rows<Format, false>(given) : put_rows<Format, true>(given);
  };
  if (given.to.out.dtype == DType::F32) {
    of(F32());
  } else if (given.to.out.dtype == DType::BF16) {
    of(BF16());
  } else {
    of(F16());
  }
}

void depthwise(const Depthwise& d) { put_all(d); }
void finish(const Finished& f) { put_all(f); }

#if defined(__AVX512VNNI__)
// Sums of kRows pixels by kPanels panels, which stay in registers, to int8.
template <int kRows, int kPanels, class Where>
JAXTAP_INLINE void multiply_block(const Tile& t, const Results& to, const Channels* of,
                                  const Nearly* nearly, int64_t row, int64_t panel, Where where) {
  Ints sums[kPanels][kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Ints start = Ints{} - (t.offsets == nullptr ? 0 : t.offsets[row + r]);
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) sums[p][r] = start;
  }
  const uint8_t* qvalues = t.qvalues + panel * t.qvalues_stride;
  for (int64_t run = 0; run < t.runs; ++run) {
    const int8_t* x = t.x + row * t.x_stride + t.x_runs[run];
    for (int64_t i = 0; i < t.k; i += 4, qvalues += 4 * kLanes) {
      Words weights[kPanels];
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) weights[p] = read<Words>(qvalues + p * t.qvalues_stride);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        uint32_t word;
        std::memcpy(&word, x + r * t.x_stride + i, 4);
        const Words four = Words{} + word;
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) add_products(weights[p], four, sums[p][r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) {
    put<F32, true>(to, of[p], nearly[p], row, (panel + p) * kLanes, sums[p], where);
  }
}

template <int kRows, int kPanels, class Where>
void multiply_rows(const Tile& t, const Results& to, const Channels* of, const Nearly* nearly,
                   int64_t row, int64_t end, int64_t panel, Where where) {
  for (; row + kRows <= end; row += kRows) {
    multiply_block<kRows, kPanels>(t, to, of, nearly, row, panel, where);
  }
  if constexpr (kRows > 1) {
    if (row < end) multiply_rows<kRows / 2, kPanels>(t, to, of, nearly, row, end, panel, where);
  }
}

template <int kPanels, class Where>
JAXTAP_INLINE void multiply_panels(const Tile& t, const Results& to, int64_t panel, Where where) {
  Channels of[kPanels];
  Nearly nearly[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    of[p] = channels_of<F32, true>(to, (panel + p) * kLanes, where);
    nearly[p] = nearly_of(to, of[p]);
  }
  multiply_rows<6, kPanels>(t, to, of, nearly, 0, t.rows, panel, where);
}

// All rows by a few panels, before the next panels: their weights stay in the first cache.
void multiply(const Tile& given, const Results& results) {
  const Tile t = given;
  const Results to = results;
  const int64_t whole = to.out.columns / kLanes;
  int64_t panel = 0;
  for (; panel + 4 <= whole; panel += 4) multiply_panels<4>(t, to, panel, Whole());
  for (; panel + 2 <= whole; panel += 2) multiply_panels<2>(t, to, panel, Whole());
  if (panel < whole) multiply_panels<1>(t, to, panel++, Whole());
  if (panel < t.panels) multiply_panels<1>(t, to, panel, Part{to.out.columns - panel * kLanes});
}
#else
constexpr void (*multiply)(const Tile&, const Results&) = nullptr;
#endif

template <class Format>
void quantize_numbers(const void* x, int64_t count, Scale scale, int8_t* to) {
  const auto* from = static_cast<const typename Format::Type*>(x);
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    Floats values[4];
    Ints near[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) values[j] = load<Format>(from + i + j * kLanes);
    quantize<true>(values, scale, near);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) write_bytes(to + i + j * kLanes, near[j], Whole());
  }
  over(count - i, [&](int64_t rest, auto where) {
    const Floats values[1] = {load<Format>(from + i + rest, where)};
    Ints near[1];
    quantize<true>(values, scale, near);
    write_bytes(to + i + rest, near[0], where);
  });
}

void quantize_floats(const void* x, DType dtype, int64_t count, Scale scale, int8_t* to) {
  if (dtype == DType::F32) {
    quantize_numbers<F32>(x, count, scale, to);
  } else if (dtype == DType::BF16) {
    quantize_numbers<BF16>(x, count, scale, to);
  } else {
    quantize_numbers<F16>(x, count, scale, to);
  }
}

#if defined(__AVX512F__)
// Sums of four bytes each, in 16 lanes.
JAXTAP_INLINE __m512i word_sums(const int8_t* x, int64_t size) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    sums = _mm512_dpbusd_epi32(sums, ones, _mm512_loadu_si512(x + i));
  }
  if (i == size) return sums;
  const __mmask64 rest = (__mmask64{1} << (size - i)) - 1;
  return _mm512_dpbusd_epi32(sums, ones, _mm512_maskz_loadu_epi8(rest, x + i));
}

// The sum of the lanes of each of 16 vectors: halves of pairs are added up, in four steps.
JAXTAP_INLINE __m512i sums_of_lanes(__m512i (&x)[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                            _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]),
                            _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    x[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0xdd));
  }
  return _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x88),
                          _mm512_shuffle_i32x4(x[0], x[1], 0xdd));
}
#endif

void sum(const int8_t* x, int64_t count, int64_t size, int32_t zero_point, int32_t* sums) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    __m512i words[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) words[j] = word_sums(x + (i + j) * size, size);
    const __m512i found = _mm512_mullo_epi32(sums_of_lanes(words), _mm512_set1_epi32(zero_point));
    _mm512_storeu_si512(sums + i, found);
  }
#endif
  for (; i < count; ++i) {
    int32_t found = 0;
    for (int64_t j = 0; j < size; ++j) found += x[i * size + j];
    sums[i] = found * zero_point;
  }
}

void unpack(const Unpack& u) {
  over(u.columns, [&](int64_t i, auto where) {
    // Lines are of 16 or 32 columns: whole vectors can be read.
    const Ints value =
        (same_bits<Ints>(read<Words>(u.line + 4 * i) >> u.shift) & u.mask) - u.zero_point;
    if constexpr (kTaps == 1) {
      write(u.words + i, __builtin_convertvector(value, Floats), where);
    } else {
      Words word = {};
      if (u.place > 0) word = read<Words>(u.words + i, where);
      write(u.words + i, word | (same_bits<Words>(value & 255) << (8 * u.place)), where);
      if constexpr (kMore != 0) {
        write(u.starts + i, read<Ints>(u.starts + i, where) - value * kMore, where);
      }
    }
  });
}

}  // namespace

const Table& make_table() {
  static const Table table{kLanes,   kTaps,           spread, depthwise, finish,
                           multiply, quantize_floats, sum,    unpack};
  return table;
}

}  // namespace jaxtap::convolution::JAXTAP_ISA_NAMESPACE
