// Arrays to float32 and back.

#include "te/isa/formats.h"
#include "te/isa/table.h"

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
  table.decode[0] = decode<E4M3>;
  table.decode[1] = decode<E5M2>;
  table.decode[2] = decode<Int8>;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
