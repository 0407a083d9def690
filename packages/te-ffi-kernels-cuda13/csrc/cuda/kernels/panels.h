// The panels of a packed weight (common/packed.h), as kernels read them.
#pragma once

#include "common/packed.h"
#include "cuda/formats.h"

namespace jaxtap::cuda {
namespace {

constexpr int kCols = static_cast<int>(kPanelColumns);
constexpr int kQuad = 4;   // columns of a line in 16 bytes
constexpr int kLine = 64;  // bytes: 16 columns of 4 rows in 8 bits, of 8 rows in 4 bits

struct Panels {
  const uint8_t* data;
  int64_t k, n, group, bytes, codes_offset, lines, count;
  int bits;
};

// Throws for an address that no panel can begin at.
inline Panels panels_of(const uint8_t* data, int64_t k, int64_t n, int64_t group, int bits) {
  if (!aligned(16, data)) {
    throw invalid_argument("the packed weight begins at an address that isn't a multiple of 16; "
                           "XLA's arrays do");
  }
  const PanelLayout layout = panel_layout(k, group, bits);
  return {data,
          k,
          n,
          group,
          layout.panel_bytes(),
          layout.codes_offset(),
          layout.codes_bytes() / kLine,
          panel_count(n),
          bits};
}

constexpr uint32_t kMagic = 0x5057544au;  // "JTWP"
constexpr uint32_t kSalt = 0x9E3779B9u;

JAXTAP_DEVICE uint32_t panel_kind(int bits, int columns) {
  return 1u | static_cast<uint32_t>(bits) << 8 | static_cast<uint32_t>(columns) << 16;
}

JAXTAP_DEVICE int columns_of(const Panels& weight, int64_t index) {
  const int64_t rest = weight.n - index * kCols;
  return static_cast<int>(rest < kCols ? rest : kCols);
}

JAXTAP_DEVICE const float* scales_of(const uint8_t* panel) {
  return reinterpret_cast<const float*>(panel + kPanelHeader);
}

// Whether a panel says that it's of this weight.
JAXTAP_DEVICE bool fits(const Panels& weight, int64_t index) {
  const auto* words = reinterpret_cast<const uint32_t*>(weight.data + index * weight.bytes);
  uint32_t sum = 0;
  JAXTAP_UNROLL
  for (int i = 0; i < 6; ++i) sum += words[i];
  return words[0] == kMagic && words[1] == panel_kind(weight.bits, columns_of(weight, index)) &&
         words[2] == static_cast<uint32_t>(weight.k) &&
         words[3] == static_cast<uint32_t>(weight.group) && words[6] == (sum ^ kSalt);
}

// The code in the lowest bits of a word, whose others are zero, as a number: it's the last places
// of a float32 of 2**23.
template <int kBits>
JAXTAP_DEVICE float number(uint32_t code) {
  return bits_float(0x4b000000u | code) - (8388608.0f + (1 << (kBits - 1)));
}

}  // namespace
}  // namespace jaxtap::cuda
