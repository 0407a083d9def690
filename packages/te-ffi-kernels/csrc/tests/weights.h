// Buffers of exactly the size that is used, at odd addresses, and packed weights in them.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "common/convert.h"
#include "common/dtype.h"
#include "common/isa.h"
#include "common/packed.h"
#include "matmul/matmul.h"
#include "matmul/pack.h"
#include "tests/narrow.h"

namespace jaxtap::testing {

// What runs here. The tests are linked with emulated tiles where the machine has no real ones.
inline std::vector<Isa> tested_isas() {
  std::vector<Isa> isas = available_isas();
#if defined(JAXTAP_EMULATE_AMX)
  if (isas.back() != Isa::kAmx) isas.push_back(Isa::kAmx);
#endif
  return isas;
}

// `bytes` bytes that end where the allocation ends, `offset` after its begin.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t offset)
      : data_(new uint8_t[static_cast<size_t>(bytes + offset)]), bytes_(bytes), offset_(offset) {
    std::memset(data_.get(), 0xA5, static_cast<size_t>(bytes + offset));
  }
  uint8_t* get() { return data_.get() + offset_; }
  const uint8_t* get() const { return data_.get() + offset_; }
  int64_t size() const { return bytes_; }
  const uint8_t* allocation() const { return data_.get(); }

 private:
  std::unique_ptr<uint8_t[]> data_;
  int64_t bytes_, offset_;
};

inline double element(const uint8_t* data, DType type, int64_t index) {
  if (type == DType::F32) {
    float x;
    std::memcpy(&x, data + 4 * index, 4);
    return static_cast<double>(x);
  }
  uint16_t half;
  std::memcpy(&half, data + 2 * index, 2);
  return static_cast<double>(type == DType::BF16 ? bf16_to_f32(half) : f16_to_f32(half));
}

inline void set_element(uint8_t* data, DType type, int64_t index, float value) {
  if (type == DType::F32) {
    std::memcpy(data + 4 * index, &value, 4);
    return;
  }
  const uint16_t half = type == DType::BF16 ? f32_to_bf16(value) : f32_to_f16(value);
  std::memcpy(data + 2 * index, &half, 2);
}

using jaxtap::panel_layout;

// By the bits of scales, which are floats.
inline PanelLayout panel_layout(int64_t k, int64_t group, int bits, int scale_bits) {
  return jaxtap::panel_layout(k, group, bits, scale_bits == 16 ? ScaleKind::kF16 : ScaleKind::kF32);
}

// Every kind of weight in 4 bits that has a table.
struct TableKind {
  int table_id;
  ScaleKind scale_kind;
};
inline constexpr TableKind kTableKinds[] = {{1, ScaleKind::kF32},  {1, ScaleKind::kF16},
                                            {1, ScaleKind::kE8M0}, {1, ScaleKind::kE4M3},
                                            {2, ScaleKind::kF16},  {2, ScaleKind::kF32},
                                            {3, ScaleKind::kF32},  {3, ScaleKind::kF16}};

struct Weights {
  int64_t k, n, group;
  int bits;
  PanelLayout layout;
  std::vector<int8_t> qvalues;
  std::vector<float> scales;  // numbers that the layout's scales hold
  std::vector<float> column_scales;
  Buffer buffer;

  int64_t scale_rows() const { return group == 0 ? 1 : k / group; }
  int8_t qvalue(int64_t row, int64_t column) const {
    return qvalues[static_cast<size_t>(row * n + column)];
  }
  // What a quantized value stands for, as an integer; and the scale times the table's factor.
  int number(int64_t row, int64_t column) const {
    const int value = qvalue(row, column);
    return layout.table_id == 0 ? value : layout.table().values[value];
  }
  float scale(int64_t row, int64_t column) const {
    float scale = scales[static_cast<size_t>((group == 0 ? 0 : row / group) * n + column)];
    if (layout.has_column_scales()) scale *= column_scales[static_cast<size_t>(column)];
    return layout.table_id == 0 ? scale : scale * layout.table().factor;
  }
  PackedWeights packed() const {
    return {buffer.get(), panel_count(n, layout.columns()), layout.panel_bytes(), n, layout};
  }
  // The scales as they are packed.
  std::vector<uint8_t> scale_bytes() const {
    std::vector<uint8_t> bytes(scales.size() * static_cast<size_t>(layout.scale_bits() / 8));
    for (size_t i = 0; i < scales.size(); ++i) {
      if (layout.scale_kind == ScaleKind::kE8M0) {
        bytes[i] = f32_to_e8m0(scales[i]);
      } else if (layout.scale_kind == ScaleKind::kE4M3) {
        bytes[i] = f32_to_f8e4m3fn(scales[i]);
      } else {
        set_element(bytes.data(), layout.scale_bits() == 16 ? DType::F16 : DType::F32,
                    static_cast<int64_t>(i), scales[i]);
      }
    }
    return bytes;
  }
  void pack_again() {
    const PackedWeights p = packed();
    pack(qvalues.data(), scale_bytes().data(), n, layout, buffer.get(), p.panels, p.panel_bytes,
         Parallel(), column_scales.data());
  }
};

inline Weights random_weights(int64_t n, const PanelLayout& layout, std::mt19937& random,
                              int64_t offset = 0, int constant = 1000) {
  const int bits = layout.bits;
  const int64_t count = panel_count(n, layout.columns());
  Weights w{layout.k, n,  layout.group, bits, layout,
            {},       {}, {},           Buffer(count * layout.panel_bytes(), offset)};
  w.qvalues.resize(static_cast<size_t>(w.k * n));
  const int low = bits == 8 ? -128 : layout.table_id == 0 ? -8 : 0;
  std::uniform_int_distribution<int> qvalue(low, bits == 8 ? 127 : low + 15);
  for (int8_t& c : w.qvalues) c = static_cast<int8_t>(constant == 1000 ? qvalue(random) : constant);
  std::uniform_real_distribution<float> scale(0.001f, 0.01f);
  w.scales.resize(static_cast<size_t>(w.scale_rows() * n));
  for (float& s : w.scales) {
    s = scale(random);
    if (layout.scale_kind == ScaleKind::kF16) s = f16_to_f32(f32_to_f16(s));
    if (layout.scale_kind == ScaleKind::kE8M0) s = e8m0_to_f32(f32_to_e8m0(s));
    // Some are subnormal, and some negative.
    if (layout.scale_kind == ScaleKind::kE4M3) {
      const float sign = random() % 8 == 0 ? -1.0f : 1.0f;
      s = f8e4m3fn_to_f32(f32_to_f8e4m3fn(sign * s * (random() % 2 == 0 ? 1.0f : 1000.0f)));
    }
  }
  w.column_scales.resize(static_cast<size_t>(n));
  for (float& s : w.column_scales) s = scale(random);
  w.pack_again();
  return w;
}

inline Weights random_weights(int64_t k, int64_t n, int64_t group, int bits, std::mt19937& random,
                              int64_t offset = 0, int constant = 1000) {
  return random_weights(n, panel_layout(k, group, bits), random, offset, constant);
}

}  // namespace jaxtap::testing
