// Transposition of bytes, in squares of 16 x 16 that live in registers.

#include "te/isa/table.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(16)));

inline __attribute__((always_inline)) Bytes low(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

inline __attribute__((always_inline)) Bytes high(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}

// One of four rounds. Interleaving the rows of the two halves moves the top bit of a row's number
// to the end of a byte's place; after four rounds rows and places have changed roles.
inline __attribute__((always_inline)) void interleave(const Bytes* in, Bytes* out) {
  for (int i = 0; i < 8; ++i) {
    out[2 * i] = low(in[i], in[i + 8]);
    out[2 * i + 1] = high(in[i], in[i + 8]);
  }
}

void square(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
  Bytes a[16], b[16];
  for (int i = 0; i < 16; ++i) __builtin_memcpy(&a[i], in + i * in_stride, 16);
  interleave(a, b);
  interleave(b, a);
  interleave(a, b);
  interleave(b, a);
  for (int i = 0; i < 16; ++i) __builtin_memcpy(out + i * out_stride, &a[i], 16);
}

// A full line of the cache, past the caches: it isn't read before it's overwritten.
void write_line(const uint8_t* from, uint8_t* to) {
#if defined(__SSE2__)
  for (int i = 0; i < kTile; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  __builtin_memcpy(to, from, kTile);
#endif
}

void transpose(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride,
               int64_t rows, int64_t cols, bool past_caches) {
  alignas(64) uint8_t turned[kTile * kTile];
  const int64_t whole_rows = rows / 16 * 16, whole_cols = cols / 16 * 16;
  for (int64_t c = 0; c < whole_cols; c += 16) {
    for (int64_t r = 0; r < whole_rows; r += 16) {
      square(in + r * in_stride + c, in_stride, turned + c * kTile + r, kTile);
    }
    for (int64_t r = whole_rows; r < rows; ++r) {
      for (int64_t i = c; i < c + 16; ++i) turned[i * kTile + r] = in[r * in_stride + i];
    }
  }
  for (int64_t c = whole_cols; c < cols; ++c) {
    for (int64_t r = 0; r < rows; ++r) turned[c * kTile + r] = in[r * in_stride + c];
  }
  // Each row of the result at once: a full line of the cache in the usual case.
  const bool lines = rows == kTile && out_stride % kTile == 0 &&
                     reinterpret_cast<uintptr_t>(out) % kTile == 0;
  if (lines && past_caches) {
    for (int64_t c = 0; c < cols; ++c) write_line(turned + c * kTile, out + c * out_stride);
  } else if (rows == kTile) {
    for (int64_t c = 0; c < cols; ++c) {
      __builtin_memcpy(out + c * out_stride, turned + c * kTile, kTile);
    }
  } else {
    for (int64_t c = 0; c < cols; ++c) {
      __builtin_memcpy(out + c * out_stride, turned + c * kTile, static_cast<uint64_t>(rows));
    }
  }
}

// Lines that were written past the caches are seen by other threads in order.
void fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace

void set_transpose(Table& table) { 
  table.transpose = transpose;
  table.fence = fence;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
