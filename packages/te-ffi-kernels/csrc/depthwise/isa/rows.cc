// Rows of depthwise convolutions of floats.

#include <algorithm>

#include "common/lanes_math.h"
#include "depthwise/table.h"

namespace jaxtap::depthwise::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

// a * b + sum, rounded once: `fma` rounds twice in generic C++.
JAXTAP_INLINE Floats add_product(Floats a, Floats b, Floats sum) {
#if defined(__AVX2__) || defined(JAXTAP_NEON)
  return fma(a, b, sum);
#else
  for (int i = 0; i < kLanes; ++i) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
  return sum;
#endif
}

// Stores a sum of a pixel, with what is done to it.
template <class Format, class Where>
JAXTAP_INLINE void put(const Row& r, int64_t pixel, int64_t channel, Floats sum, Where where) {
  using Type = typename Format::Type;
  const Output& out = r.out;
  const int64_t at = pixel * out.stride;
  Floats y = sum * read<Floats>(r.scales + channel, where);
  if (out.bias != nullptr) {
    y = rounded<Format>(y) +
        load<Format>(reinterpret_cast<const Type*>(out.bias) + channel, where);
  }
  if (out.residual != nullptr) {
    y = rounded<Format>(y) +
        load<Format>(reinterpret_cast<const Type*>(out.residual + at) + channel, where);
  }
  if (out.clamps) {
    y = y < out.least ? all(out.least) : y;
    y = y > out.most ? all(out.most) : y;
  }
  store<Format>(reinterpret_cast<Type*>(out.y + at) + channel, y, where);
}

template <class Format, int kCount, class Where>
JAXTAP_INLINE void put_all(const Row& r, int64_t pixel, int64_t channel,
                           const Floats (&sums)[kCount], Where where) {
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) put<Format>(r, pixel + i, channel, sums[i], where);
}

template <int kCount, class Where>
JAXTAP_INLINE void finish(const Row& r, int64_t pixel, int64_t channel,
                          const Floats (&sums)[kCount], Where where) {
  if (r.out.dtype == DType::F32) {
    put_all<F32>(r, pixel, channel, sums, where);
  } else if (r.out.dtype == DType::BF16) {
    put_all<BF16>(r, pixel, channel, sums, where);
  } else {
    put_all<F16>(r, pixel, channel, sums, where);
  }
}

// Elements of the window that a line has, [first, last), of a pixel.
struct Elements {
  int64_t first, last;

  static Elements of(const Row& r, int64_t pixel) {
    const int64_t start = pixel * r.stride - r.low;
    const int64_t first = start >= 0 ? 0 : (-start + r.dilation - 1) / r.dilation;
    const int64_t last = start >= r.size ? 0 : (r.size - 1 - start) / r.dilation + 1;
    return {std::min(first, r.window), std::min(last, r.window)};
  }
};

// The sums of kCount adjacent pixels, for some elements of the window.
template <class Format, int kCount, class Where>
JAXTAP_INLINE void any_window(const Row& r, int64_t pixel, Elements e, int64_t channel,
                              Where where) {
  using Type = typename Format::Type;
  Floats sums[kCount] = {};
  const int64_t step = r.stride * r.channels, apart = r.dilation * r.channels;
  const int64_t start = (pixel * r.stride - r.low + e.first * r.dilation) * r.channels + channel;
  for (int64_t i = 0; i < r.line_count; ++i) {
    const float* weights = r.lines[i].weights + e.first * r.channels + channel;
    const Type* x = reinterpret_cast<const Type*>(r.lines[i].x) + start;
    for (int64_t l = e.first; l < e.last; ++l, x += apart, weights += r.channels) {
      const Floats weight = read<Floats>(weights, where);
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) {
        sums[j] = add_product(load<Format>(x + j * step, where), weight, sums[j]);
      }
    }
  }
  finish(r, pixel, channel, sums, where);
}

// The same of a whole window without dilation: each number of the line is loaded once.
template <class Format, int kWindow, int kStride, int kCount, class Where>
JAXTAP_INLINE void near_window(const Row& r, int64_t pixel, int64_t channel, Where where) {
  using Type = typename Format::Type;
  Floats sums[kCount] = {};
  const int64_t start = (pixel * kStride - r.low) * r.channels + channel;
  for (int64_t i = 0; i < r.line_count; ++i) {
    const float* weights = r.lines[i].weights + channel;
    const Type* x = reinterpret_cast<const Type*>(r.lines[i].x) + start;
    Floats weight[kWindow];
#pragma GCC unroll 8
    for (int l = 0; l < kWindow; ++l) weight[l] = read<Floats>(weights + l * r.channels, where);
#pragma GCC unroll 24
    for (int at = 0; at < (kCount - 1) * kStride + kWindow; ++at) {
      const Floats number = load<Format>(x + at * r.channels, where);
#pragma GCC unroll 8
      for (int l = 0; l < kWindow; ++l) {
        const int j = (at - l) / kStride;
        if (at >= l && (at - l) % kStride == 0 && j < kCount) {
          sums[j] = add_product(number, weight[l], sums[j]);
        }
      }
    }
  }
  finish(r, pixel, channel, sums, where);
}

template <class Format, int kCount>
void any_pixels(const Row& r, int64_t pixel) {
  over(r.channels, [&](int64_t channel, auto where) {
    any_window<Format, kCount>(r, pixel, {0, r.window}, channel, where);
  });
}

// One pixel, for some elements of the window. Several vectors of channels at once, since the
// products of one vector wait for each other.
template <class Format>
void one_pixel(const Row& r, int64_t pixel, Elements e) {
  using Type = typename Format::Type;
  constexpr int kVectors = 4;
  const int64_t apart = r.dilation * r.channels;
  const int64_t start = (pixel * r.stride - r.low + e.first * r.dilation) * r.channels;
  int64_t channel = 0;
  for (; channel + kVectors * kLanes <= r.channels; channel += kVectors * kLanes) {
    Floats sums[kVectors] = {};
    for (int64_t i = 0; i < r.line_count; ++i) {
      const float* weights = r.lines[i].weights + e.first * r.channels + channel;
      const Type* x = reinterpret_cast<const Type*>(r.lines[i].x) + start + channel;
      for (int64_t l = e.first; l < e.last; ++l, x += apart, weights += r.channels) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[v] = add_product(load<Format>(x + v * kLanes), read<Floats>(weights + v * kLanes),
                                sums[v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Floats one[1] = {sums[v]};
      finish(r, pixel, channel + v * kLanes, one, Whole());
    }
  }
  over(r.channels - channel, [&](int64_t rest, auto where) {
    any_window<Format, 1>(r, pixel, e, channel + rest, where);
  });
}

template <class Format, int kWindow, int kStride, int kCount>
void near_pixels(const Row& r, int64_t pixel) {
  over(r.channels, [&](int64_t channel, auto where) {
    near_window<Format, kWindow, kStride, kCount>(r, pixel, channel, where);
  });
}

// What computes `kCount` pixels that have the whole window.
template <class Format, int kCount>
void whole_pixels(const Row& r, int64_t pixel) {
  if (r.dilation == 1 && r.stride == 1 && r.window == 3) {
    near_pixels<Format, 3, 1, kCount>(r, pixel);
  } else if (r.dilation == 1 && r.stride == 2 && r.window == 3) {
    near_pixels<Format, 3, 2, kCount>(r, pixel);
  } else if (r.dilation == 1 && r.stride == 1 && r.window == 5) {
    near_pixels<Format, 5, 1, kCount>(r, pixel);
  } else if (r.dilation == 1 && r.stride == 2 && r.window == 5) {
    near_pixels<Format, 5, 2, kCount>(r, pixel);
  } else {
    any_pixels<Format, kCount>(r, pixel);
  }
}

// Pixels in their order, those at the edges one by one: the channels of a few pixels lie together,
// so that lines are read as they lie in memory.
template <class Format>
void row_of(const Row& r) {
  const auto is_whole = [&](int64_t pixel) {
    const Elements e = Elements::of(r, pixel);
    return e.first == 0 && e.last == r.window;
  };
  for (int64_t pixel = 0; pixel < r.pixels;) {
    if constexpr (!kGeneric) {  // where that would be 3 MB of code
      const int64_t left = is_whole(pixel) ? r.pixels - pixel : 0;
      // Windows between two whole ones are whole.
      if (left >= 8 && is_whole(pixel + 7)) {
        whole_pixels<Format, 8>(r, pixel);
        pixel += 8;
        continue;
      }
      if (left >= 4 && is_whole(pixel + 3)) {
        whole_pixels<Format, 4>(r, pixel);
        pixel += 4;
        continue;
      }
      if (left >= 2 && is_whole(pixel + 1)) {
        whole_pixels<Format, 2>(r, pixel);
        pixel += 2;
        continue;
      }
    }
    one_pixel<Format>(r, pixel, Elements::of(r, pixel));
    pixel += 1;
  }
}

void row(const Row& r) {
  if (r.x_dtype == DType::F32) {
    row_of<F32>(r);
  } else if (r.x_dtype == DType::BF16) {
    row_of<BF16>(r);
  } else {
    row_of<F16>(r);
  }
}

void unpack(const uint8_t* line, int shift, int32_t mask, int32_t zero_point, int64_t columns,
            float* to) {
  over(columns, [&](int64_t i, auto where) {
    // Lines are of 16 or 32 columns: whole vectors can be read.
    const Ints found = (same_bits<Ints>(read<Words>(line + 4 * i) >> shift) & mask) - zero_point;
    write(to + i, __builtin_convertvector(found, Floats), where);
  });
}

}  // namespace

const Table& make_table() {
  static const Table table{row, unpack};
  return table;
}

}  // namespace jaxtap::depthwise::JAXTAP_ISA_NAMESPACE
