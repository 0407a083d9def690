// The panels of a packed weight (common/packed.h), as kernels read them.
#pragma once

#include "common/packed.h"
#include "cuda/formats.h"
#include "cuda/kernels/packed.h"

namespace jaxtap::cuda {
namespace {

// A line has the quantized values of all columns of a panel in as many rows as a word of them has.
template <int kBits>
constexpr int kColsOf = kBits == 8 ? 16 : 32;
template <int kBits>
constexpr int kLineOf = 4 * kColsOf<kBits>;  // bytes
template <int kBits>
constexpr int kDepthOf = 32 / kBits;  // rows

struct Panels {
  const uint8_t* data;
  int64_t k, n, group, groups, bytes, scale_bytes, lines, group_lines, count;
  int bits, scale_bits;
  PackedStack stack;
};

// Throws for an address that no panel can begin at.
inline Panels panels_of(const uint8_t* data, const PanelLayout& layout, int64_t n,
                        const PackedStack& stack = {}) {
  if (!aligned(16, data)) {
    throw invalid_argument("the packed weight begins at an address that isn't a multiple of 16; "
                           "XLA's arrays do");
  }
  if (layout.table_id != 0) {
    throw invalid_argument("kernels for GPUs have no table of ", layout.table().name,
                           ", they take int4");
  }
  Panels panels = {};
  panels.data = data;
  panels.k = layout.k;
  panels.n = n;
  panels.group = layout.group;
  panels.groups = layout.scales();
  panels.bytes = layout.panel_bytes();
  panels.scale_bytes = layout.scale_bytes();
  panels.lines = layout.qvalues_bytes() / (4 * layout.columns());
  panels.group_lines = panels.groups == 0 ? 0 : panels.lines / panels.groups;
  panels.count = panel_count(n, layout.columns());
  panels.bits = layout.bits;
  panels.scale_bits = layout.scale_bits();
  panels.stack = stack;
  return panels;
}

// The weight of a stack that an index says.
JAXTAP_DEVICE Panels picked(Panels weight, int64_t at = 0) {
  if (weight.stack.index == nullptr) return weight;
  const int64_t last = weight.stack.count - 1, given = weight.stack.index[at];
  const int64_t index = given < 0 ? given + weight.stack.count : given;
  weight.data += (index < 0 ? 0 : index < last ? index : last) * weight.stack.bytes;
  return weight;
}

// The quantized values of a line of `group`. In 4 bits each group's follow its scales.
template <int kBits>
JAXTAP_DEVICE const uint8_t* line_of(const Panels& weight, const uint8_t* panel, int64_t group,
                                     int64_t line) {
  const int64_t before = kBits == 8 ? weight.groups : group + 1;
  return panel + kPanelHeader + before * weight.scale_bytes + line * kLineOf<kBits>;
}

template <int kBits>
JAXTAP_DEVICE float scale_of(const Panels& weight, const uint8_t* panel, int64_t group, int col) {
  const int64_t qvalues = kBits == 8 ? 0 : group * weight.group_lines * kLineOf<kBits>;
  const uint8_t* scales = panel + kPanelHeader + group * weight.scale_bytes + qvalues;
  return kBits == 4 && weight.scale_bits == 16
             ? F16::load(reinterpret_cast<const uint16_t*>(scales)[col])
             : reinterpret_cast<const float*>(scales)[col];
}

constexpr uint32_t kMagic = 0x5057544au;  // "JTWP"
constexpr uint32_t kSalt = 0x9E3779B9u;

// The second word of the header of a panel: see common/packed.h.
JAXTAP_DEVICE uint32_t panel_kind(const Panels& weight, int64_t index) {
  const int64_t cols = weight.bits == 8 ? kColsOf<8> : kColsOf<4>, rest = weight.n - index * cols;
  const uint32_t kind = weight.bits == 8 ? 1u : 2u | static_cast<uint32_t>(weight.scale_bits) << 24;
  return kind | static_cast<uint32_t>(weight.bits) << 8 |
         static_cast<uint32_t>(rest < cols ? rest : cols) << 16;
}

// Whether a panel says that it's of this weight.
JAXTAP_DEVICE bool fits(const Panels& weight, int64_t index) {
  const auto* words = reinterpret_cast<const uint32_t*>(weight.data + index * weight.bytes);
  uint32_t sum = 0;
  JAXTAP_UNROLL
  for (int i = 0; i < 6; ++i) sum += words[i];
  return words[0] == kMagic && words[1] == panel_kind(weight, index) &&
         words[2] == static_cast<uint32_t>(weight.k) &&
         words[3] == static_cast<uint32_t>(weight.group) && words[6] == (sum ^ kSalt);
}

}  // namespace
}  // namespace jaxtap::cuda
