// Attention over a stretch of the cache, block by block, with a running maximum (Milakov and
// Gimelshein 2018, arXiv:1805.02867); stretches are put together at the end (Dao et al. 2023,
// "Flash-Decoding").

#include <utility>

#include "common/lanes_math.h"
#include "decode/table.h"

namespace jaxtap::decode::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

constexpr float kNone = -__builtin_inff();

struct I8 {
  using Type = int8_t;
  using Vector = Bytes;
  JAXTAP_INLINE Floats widen(Bytes x) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(same_bits<__m128i>(x)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(same_bits<int64_t>(x))));
#else
    const Ints wide = lanes::JAXTAP_ISA_NAMESPACE::widen(x);
    return __builtin_convertvector((wide << 24) >> 24, Floats);
#endif
  }
};

// Of vectors a and b whose lanes are sums in turn of kWidth numbers each: sums of twice as many.
template <int kWidth, int... kLane>
JAXTAP_INLINE Floats add_pairs(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  constexpr int kPair = 2 * kWidth;
  const Floats first = __builtin_shufflevector(
      a, b,
      (kLane / kPair * kPair + kLane % kWidth + (kLane % kPair < kWidth ? 0 : kLanes))...);
  const Floats second = __builtin_shufflevector(
      a, b,
      (kLane / kPair * kPair + kLane % kWidth + kWidth + (kLane % kPair < kWidth ? 0 : kLanes))...);
  return first + second;
}

// Lane i is the sum of the lanes of x[i].
template <int kWidth = 1>
JAXTAP_INLINE Floats sums_of(Floats* x) {
  if constexpr (kWidth == kLanes) {
    return x[0];
  } else {
    constexpr int kLeft = kLanes / kWidth / 2;
#pragma GCC unroll 8
    for (int i = 0; i < kLeft; ++i) {
      x[i] = add_pairs<kWidth>(x[2 * i], x[2 * i + 1], std::make_integer_sequence<int, kLanes>());
    }
    return sums_of<2 * kWidth>(x);
  }
}

// Rows of the cache from a position on, `step` numbers apart.
template <class Format>
struct Rows {
  const typename Format::Type* at;
  int64_t step;

  Rows(const Stretch& s, const void* cache, int64_t begin)
      : at(static_cast<const typename Format::Type*>(cache) + begin * s.step * s.size),
        step(s.step * s.size) {}
};

// `count` scales, 1 where there are none, and 0 up to whole vectors.
inline void scales_of(const Stretch& s, const float* scales, int64_t begin, int64_t count,
                      float* out) {
  for (int64_t p = 0; p < kBlock; ++p) {
    out[p] = p >= count ? 0.0f : scales == nullptr ? 1.0f : scales[(begin + p) * s.step];
  }
}

// Matmuls of kRows rows of q with `count` rows of keys, kBlock apart; kRows * kPositions sums at a
// time, which are as many as a vector has lanes. Positions beyond `count`, up to whole vectors, get
// what the last one has.
template <class Format, int kRows>
inline void logits_of(const float* q, int64_t q_stride, Rows<Format> keys, int64_t count,
                      int64_t size, float* logits) {
  constexpr int kPositions = kLanes / kRows;
  for (int64_t p = 0; p < count; p += kPositions) {
    const typename Format::Type* key[kPositions];
#pragma GCC unroll 16
    for (int i = 0; i < kPositions; ++i) {
      key[i] = keys.at + (p + i < count ? p + i : count - 1) * keys.step;
    }
    Floats sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = all(0.0f);
    over(size, [&](int64_t j, auto part) {
      Floats row[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) row[r] = read<Floats>(q + r * q_stride + j);
#pragma GCC unroll 16
      for (int i = 0; i < kPositions; ++i) {
        const Floats wide = load<Format>(key[i] + j, part);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sums[r * kPositions + i] = fma(wide, row[r], sums[r * kPositions + i]);
        }
      }
    });
    const Floats found = sums_of(sums);
    float lanes[kLanes];
    write(lanes, found);
    for (int r = 0; r < kRows; ++r) {
      std::memcpy(logits + r * kBlock + p, lanes + r * kPositions, 4 * kPositions);
    }
  }
  // The rest of the last vector.
  for (int64_t p = (count + kPositions - 1) / kPositions * kPositions; p % kLanes != 0; ++p) {
    for (int r = 0; r < kRows; ++r) logits[r * kBlock + p] = 0.0f;
  }
}

// What a row's logits from `begin` on, `count` of them, become: capped, and -infinity where they
// are not seen. Those beyond `count`, up to whole vectors, are not seen.
inline void limit(const Stretch& s, int64_t row, int64_t begin, int64_t count, const float* scales,
                  float* logits) {
  for (int64_t p = 0; p < count; p += kLanes) {
    Floats x = read<Floats>(logits + p) * read<Floats>(scales + p);
    const int64_t rest = count - p < kLanes ? count - p : kLanes;
    if (s.softcap != 0.0f) {
      // tanh(x) = 1 - 2 / (e^2x + 1)
      const Floats e = exp(x * (2.0f / s.softcap));
      x = s.softcap - 2.0f * s.softcap / (e + 1.0f);
    }
    const int64_t first = s.first[row] - begin - p, last = s.last[row] - begin - p;
    const Ints at = iota();
    const auto bound = [](int64_t x) { return static_cast<int32_t>(x < 0 ? 0 : x > 64 ? 64 : x); };
    const Ints seen = (at >= bound(first)) & (at < bound(last < rest ? last : rest));
    x = seen ? x : all(kNone);
    if (s.masks != nullptr) {
      const Ints open = widen(read<Bytes>(s.masks[row] + begin + p, Part{rest}));
      x = open != 0 ? x : all(kNone);
    }
    write(logits + p, x);
  }
}

// totals[r] += weights[r] * values, for kRows rows and kVectors vectors of columns, of which the
// last may be a part.
template <class Format, int kRows, int kVectors, class Part>
JAXTAP_INLINE void add_values(const float* weights, const typename Format::Type* values,
                              int64_t step, int64_t count, float* totals, int64_t stride,
                              Part last) {
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = read<Floats>(totals + r * stride + v * kLanes);
  }
  for (int64_t p = 0; p < count; ++p) {
    const typename Format::Type* value = values + p * step;
    Floats part[kVectors];
    for (int v = 0; v + 1 < kVectors; ++v) part[v] = load<Format>(value + v * kLanes);
    part[kVectors - 1] = load<Format>(value + (kVectors - 1) * kLanes, last);
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = all(weights[r * kBlock + p]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(weight, part[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) write(totals + r * stride + v * kLanes, sums[r][v]);
  }
}

template <class Format, int kRows>
inline void add_rows(const float* weights, Rows<Format> values, int64_t count, int64_t size,
                     float* totals, int64_t stride) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= size; j += 4 * kLanes) {
    add_values<Format, kRows, 4>(weights, values.at + j, values.step, count, totals + j, stride,
                                 Whole());
  }
  over(size - j, [&](int64_t i, auto part) {
    add_values<Format, kRows, 1>(weights, values.at + j + i, values.step, count, totals + j + i,
                                 stride, part);
  });
}

template <class Format>
void attend(const Stretch& s) {
  const int64_t stride = padded(s.size);
  float* logits = s.scratch;  // [rows, kBlock]
  float* scales = logits + s.rows * kBlock;
  for (int64_t r = 0; r < s.rows; ++r) {
    s.out.most[r] = kNone;
    s.out.sums[r] = 0.0f;
    for (int64_t j = 0; j < stride; j += kLanes) write(s.out.totals + r * stride + j, all(0.0f));
  }
  for (int64_t begin = s.begin; begin < s.end; begin += kBlock) {
    const int64_t count = s.end - begin < kBlock ? s.end - begin : kBlock;
    const Rows<Format> keys(s, s.keys, begin);
    scales_of(s, s.key_scales, begin, count, scales);
    int64_t first = 0;
    for (; first + 4 <= s.rows; first += 4) {
      logits_of<Format, 4>(s.q + first * stride, stride, keys, count, s.size,
                           logits + first * kBlock);
    }
    for (; first < s.rows; ++first) {
      logits_of<Format, 1>(s.q + first * stride, stride, keys, count, s.size,
                           logits + first * kBlock);
    }
    bool any = false;
    for (int64_t r = 0; r < s.rows; ++r) {
      float* row = logits + r * kBlock;
      limit(s, r, begin, count, scales, row);
      // `larger` leaves NaN out here: what it makes of the sums is NaN anyway.
      Floats found = all(kNone);
      for (int64_t p = 0; p < count; p += kLanes) found = max(read<Floats>(row + p), found);
      const float before = s.out.most[r];
      const float most = largest_of(max(found, all(before)));
      const float from = most == kNone ? 0.0f : most;
      Floats sums = all(0.0f);
      for (int64_t p = 0; p < count; p += kLanes) {
        const Floats x = read<Floats>(row + p);
        Floats e = exp(x - from);
        e = x == kNone ? all(0.0f) : e;
        sums += e;
        write(row + p, e);
      }
      const float sum = sum_of(sums);
      any = any || sum != 0.0f;
      s.out.most[r] = most;
      if (before != most && before != kNone) {
        const Floats less = exp(all(before - most));
        s.out.sums[r] *= less[0];
        float* totals = s.out.totals + r * stride;
        for (int64_t j = 0; j < stride; j += kLanes) {
          write(totals + j, read<Floats>(totals + j) * less);
        }
      }
      s.out.sums[r] += sum;
    }
    if (!any) continue;  // nobody sees this block
    const Rows<Format> values(s, s.values, begin);
    if (s.value_scales != nullptr) {
      scales_of(s, s.value_scales, begin, count, scales);
      for (int64_t r = 0; r < s.rows; ++r) {
        for (int64_t p = 0; p < count; p += kLanes) {
          float* at = logits + r * kBlock + p;
          write(at, read<Floats>(at) * read<Floats>(scales + p));
        }
      }
    }
    int64_t r = 0;
    for (; r + 4 <= s.rows; r += 4) {
      add_rows<Format, 4>(logits + r * kBlock, values, count, s.size, s.out.totals + r * stride, stride);
    }
    for (; r < s.rows; ++r) {
      add_rows<Format, 1>(logits + r * kBlock, values, count, s.size, s.out.totals + r * stride, stride);
    }
  }
}

template <class Format>
void scaled(const void* from, float scale, int64_t size, float* to) {
  const auto* row = static_cast<const typename Format::Type*>(from);
  for (int64_t j = 0; j < padded(size); j += kLanes) write(to + j, all(0.0f));
  over(size, [&](int64_t j, auto part) { write(to + j, load<Format>(row + j, part) * scale); });
}

template <class Format>
void finish(const Partial& first, int64_t parts, int64_t stride, int64_t size, void* out) {
  auto* row = static_cast<typename Format::Type*>(out);
  const int64_t width = padded(size);
  float most = kNone;
  for (int64_t i = 0; i < parts; ++i) {
    const float one = first.most[i * stride];
    most = one > most ? one : most;
  }
  const float from = most == kNone ? 0.0f : most;
  float sum = 0.0f;
  for (int64_t i = 0; i < parts; ++i) {
    if (first.most[i * stride] == kNone && first.sums[i * stride] == 0.0f) continue;
    sum += exp(all(first.most[i * stride] - from))[0] * first.sums[i * stride];
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  over(size, [&](int64_t j, auto part) {
    Floats total = all(0.0f);
    for (int64_t i = 0; i < parts; ++i) {
      if (first.most[i * stride] == kNone && first.sums[i * stride] == 0.0f) continue;
      const Floats weight = exp(all(first.most[i * stride] - from));
      total = fma(read<Floats>(first.totals + i * stride * width + j), weight, total);
    }
    store<Format>(row + j, total * inverse, part);
  });
}

}  // namespace

const Table& make_table() {
  static const Table table = {{attend<F32>, attend<BF16>, attend<F16>, attend<I8>},
                              {scaled<F32>, scaled<BF16>, scaled<F16>},
                              {finish<F32>, finish<BF16>, finish<F16>}};
  return table;
}

}  // namespace jaxtap::decode::JAXTAP_ISA_NAMESPACE
