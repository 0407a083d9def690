#include "matmul/pack.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "common/packed.h"

namespace jaxtap {
namespace {

constexpr int64_t kPanelsPerTask = 4;  // 64 columns: whole cache lines of the rows

void check_size(const PanelLayout& layout, int64_t n, int64_t panels, int64_t panel_bytes) {
  if (panels != panel_count(n) || panel_bytes != layout.panel_bytes()) {
    throw invalid_argument("packed weight: k = ", layout.k, ", n = ", n, ", group = ", layout.group,
                           " and ", layout.bits, " bits are a buffer of [", panel_count(n), ", ",
                           layout.panel_bytes(), "] bytes, got [", panels, ", ", panel_bytes, "]");
  }
}

// Where code (row, column) of a panel is: its byte, and for 4 bits whether in the high nibble.
struct Place {
  int64_t byte;
  bool high;
};

Place place(int64_t row, int64_t column, int bits) {
  if (bits == 8) return {row / 4 * 64 + column * 4 + row % 4, false};
  return {row / 8 * 64 + column * 4 + row % 4, row % 8 >= 4};
}

void pack_panel(const int8_t* codes, const float* scales, int64_t n, const PanelLayout& layout,
                int64_t index, uint8_t* panel) {
  const int columns = panel_columns(n, index);
  const int64_t first = index * kPanelColumns;
  for (int64_t g = 0; g < layout.scales(); ++g) {
    float row[kPanelColumns] = {};
    std::memcpy(row, scales + g * n + first, 4 * static_cast<size_t>(columns));
    std::memcpy(panel + kPanelHeader + 64 * g, row, 64);
  }
  uint8_t* out = panel + layout.codes_offset();
  std::memset(out, layout.bits == 8 ? 0x80 : 0x88, static_cast<size_t>(layout.codes_bytes()));
  for (int64_t row = 0; row < layout.k; ++row) {
    const int8_t* source = codes + row * n + first;
    if (layout.bits == 8) {
      uint8_t* block = out + row / 4 * 64 + row % 4;
      for (int c = 0; c < columns; ++c) {
        block[4 * c] = static_cast<uint8_t>(static_cast<uint8_t>(source[c]) ^ 0x80u);
      }
      continue;
    }
    for (int c = 0; c < columns; ++c) {
      const int code = source[c];
      if (code < -8 || code > 7) {
        throw invalid_argument("pack_w4: code ", code, " at row ", row, ", column ", first + c,
                               " is not in [-8, 7]; quantize to int4, or use pack_w8");
      }
      const Place at = place(row, c, 4);
      uint8_t& byte = out[at.byte];
      const uint8_t nibble = static_cast<uint8_t>(code + 8);
      byte = at.high ? static_cast<uint8_t>((byte & 0x0f) | nibble << 4)
                     : static_cast<uint8_t>((byte & 0xf0) | nibble);
    }
  }
  write_panel_header(panel, layout, columns);
}

void unpack_panel(const uint8_t* panel, int64_t n, const PanelLayout& layout, int64_t index,
                  int8_t* codes, float* scales) {
  const int columns = panel_columns(n, index);
  const int64_t first = index * kPanelColumns;
  const PanelView view = open_panel(panel, layout, columns, index);
  check_panel_payload(panel, layout, index);
  for (int64_t g = 0; g < layout.scales(); ++g) {
    std::memcpy(scales + g * n + first, view.scales + 64 * g, 4 * static_cast<size_t>(columns));
  }
  for (int64_t row = 0; row < layout.k; ++row) {
    int8_t* target = codes + row * n + first;
    for (int c = 0; c < columns; ++c) {
      const Place at = place(row, c, layout.bits);
      const uint8_t byte = view.codes[at.byte];
      target[c] = static_cast<int8_t>(layout.bits == 8 ? byte - 128
                                                       : (at.high ? byte >> 4 : byte & 15) - 8);
    }
  }
}

// A scale array of float32 may be unaligned: it is only copied.
template <typename Body>
void each_panel(int64_t panels, const Parallel& parallel, const Body& body) {
  parallel.run((panels + kPanelsPerTask - 1) / kPanelsPerTask, [&](int64_t task) {
    const int64_t end = std::min(panels, (task + 1) * kPanelsPerTask);
    for (int64_t i = task * kPanelsPerTask; i < end; ++i) body(i);
  });
}

}  // namespace

void pack(const int8_t* codes, const float* scales, int64_t k, int64_t n, int64_t group, int bits,
          uint8_t* out, int64_t panels, int64_t panel_bytes, const Parallel& parallel) {
  const PanelLayout layout = panel_layout(k, group, bits);
  check_size(layout, n, panels, panel_bytes);
  each_panel(panels, parallel, [&](int64_t i) {
    pack_panel(codes, scales, n, layout, i, out + i * panel_bytes);
  });
}

void unpack(const uint8_t* buffer, int64_t panels, int64_t panel_bytes, int64_t k, int64_t n,
            int64_t group, int bits, int8_t* codes, float* scales, const Parallel& parallel) {
  const PanelLayout layout = panel_layout(k, group, bits);
  check_size(layout, n, panels, panel_bytes);
  each_panel(panels, parallel, [&](int64_t i) {
    unpack_panel(buffer + i * panel_bytes, n, layout, i, codes, scales);
  });
}

}  // namespace jaxtap
