// Arrays to float32 and back.

#include "te/isa/formats.h"
#include "te/isa/table.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {
namespace {

template <class Format>
void load(const void* in, float* __restrict out, int64_t count) {
  const auto* __restrict from = static_cast<const typename Format::Type*>(in);
  for (int64_t i = 0; i < count; ++i) out[i] = Format::load(from[i]);
}

template <class Format>
void store(const float* __restrict in, void* out, int64_t count) {
  auto* __restrict to = static_cast<typename Format::Type*>(out);
  for (int64_t i = 0; i < count; ++i) to[i] = Format::store(in[i]);
}

// Full lines of the cache, which aren't read before they are overwritten.
inline __attribute__((always_inline)) void write_lines(const void* in, void* out, int64_t lines) {
  const char* from = static_cast<const char*>(in);
  char* to = static_cast<char*>(out);
#if defined(__AVX512F__)
  for (int64_t i = 0; i < lines; ++i) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64 * i),
                        _mm512_loadu_si512(from + 64 * i));
  }
#elif defined(__SSE2__)
  for (int64_t i = 0; i < lines * 4; ++i) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + 16 * i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i)));
  }
#else
  __builtin_memcpy(to, from, static_cast<uint64_t>(lines) * 64);
#endif
}

template <class Format>
void stream(const float* in, void* out, int64_t count) {
  using Type = typename Format::Type;
  constexpr int64_t kBytes = sizeof(Type), kLine = 64 / kBytes, kLines = 16;
  auto* to = static_cast<Type*>(out);
  const int64_t over = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % 64);
  const int64_t before = over == 0 ? 0 : (64 - over) / kBytes;
  if (over % kBytes != 0 || count < before + kLine) return store<Format>(in, out, count);
  store<Format>(in, to, before);
  const int64_t end = before + (count - before) / kLine * kLine;
  if constexpr (kBytes == 4) {
    write_lines(in + before, to + before, (end - before) / kLine);
  } else {
    Type some[kLine * kLines];
    for (int64_t i = before; i < end; i += kLine * kLines) {
      const int64_t part = end - i < kLine * kLines ? end - i : kLine * kLines;
      store<Format>(in + i, some, part);
      write_lines(some, to + i, part / kLine);
    }
  }
  store<Format>(in + end, to + end, count - end);
}

template <class Format>
void decode(const uint8_t* __restrict in, float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = Format::decode(in[i]);
}

}  // namespace

void set_conversions(Table& table) {
  table.load[0] = load<F32>;
  table.load[1] = load<BF16>;
  table.load[2] = load<F16>;
  table.store[0] = store<F32>;
  table.store[1] = store<BF16>;
  table.store[2] = store<F16>;
  table.stream[0] = stream<F32>;
  table.stream[1] = stream<BF16>;
  table.stream[2] = stream<F16>;
  table.decode[0] = decode<E4M3>;
  table.decode[1] = decode<E5M2>;
  table.decode[2] = decode<Int8>;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
