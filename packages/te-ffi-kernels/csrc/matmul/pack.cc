#include "matmul/pack.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "common/packed.h"

namespace jaxtap {
namespace {

constexpr int64_t kColumnsPerTask = 64;  // whole cache lines of the rows

// What is added to a quantized value in 4 bits.
int zero_of(const PanelLayout& layout) { return layout.table_id == 0 ? 8 : 0; }

void pack_panel(const int8_t* qvalues, const uint8_t* scales, const uint8_t* column_scales,
                int64_t n, const PanelLayout& layout, int64_t index, uint8_t* panel) {
  const int columns = panel_columns(n, index, layout.columns());
  const int64_t first = index * layout.columns();
  const size_t size = static_cast<size_t>(layout.scale_bits() / 8);
  const int zero = zero_of(layout), least = -zero, most = 15 - zero;
  const int fill = layout.bits == 8 ? 0x80 : zero * 0x11;
  std::memset(panel, fill, static_cast<size_t>(layout.panel_bytes()));
  if (layout.has_column_scales()) {
    std::memcpy(panel + kPanelHeader, column_scales + 4 * first, static_cast<size_t>(4 * columns));
  }
  for (int64_t g = 0; g < layout.scales(); ++g) {
    uint8_t* row = panel + layout.scales_at(g);
    std::memset(row, 0, static_cast<size_t>(layout.scale_bytes()));
    std::memcpy(row, scales + static_cast<size_t>(g * n + first) * size,
                static_cast<size_t>(columns) * size);
  }
  for (int64_t row = 0; row < layout.k; ++row) {
    const int8_t* source = qvalues + row * n + first;
    uint8_t* out = panel + layout.qvalues_at(row) + row % 4;
    if (layout.bits == 8) {
      for (int c = 0; c < columns; ++c) {
        out[4 * c] = static_cast<uint8_t>(static_cast<uint8_t>(source[c]) ^ 0x80u);
      }
      continue;
    }
    const bool high = layout.high(row);
    for (int c = 0; c < columns; ++c) {
      const int qvalue = source[c];
      if (qvalue < least || qvalue > most) {
        throw invalid_argument("pack_w4: quantized values must be in [", least, ", ", most,
                               "], got ", qvalue, " at row ", row, ", column ", first + c,
                               ". Quantize to ", layout.table().name,
                               layout.table_id == 0 ? ", or use pack_w8." : ".");
      }
      const uint8_t nibble = static_cast<uint8_t>(qvalue + zero);
      out[4 * c] = high ? static_cast<uint8_t>((out[4 * c] & 0x0f) | nibble << 4)
                        : static_cast<uint8_t>((out[4 * c] & 0xf0) | nibble);
    }
  }
  write_panel_header(panel, layout, columns);
}

void unpack_panel(const uint8_t* panel, int64_t n, const PanelLayout& layout, int64_t index,
                  int8_t* qvalues, uint8_t* scales, uint8_t* column_scales) {
  const int columns = panel_columns(n, index, layout.columns());
  const int64_t first = index * layout.columns();
  const uint64_t key = check_header(panel, layout, columns, index);
  check_payloads(panel, layout, index, 1, key, Parallel());
  const size_t size = static_cast<size_t>(layout.scale_bits() / 8);
  if (layout.has_column_scales()) {
    std::memcpy(column_scales + 4 * first, panel + kPanelHeader, static_cast<size_t>(4 * columns));
  }
  const int zero = layout.bits == 8 ? 0 : zero_of(layout);
  for (int64_t g = 0; g < layout.scales(); ++g) {
    std::memcpy(scales + static_cast<size_t>(g * n + first) * size, panel + layout.scales_at(g),
                static_cast<size_t>(columns) * size);
  }
  for (int64_t row = 0; row < layout.k; ++row) {
    int8_t* target = qvalues + row * n + first;
    for (int c = 0; c < columns; ++c) {
      target[c] = static_cast<int8_t>(panel_value(panel, layout, row, c) - zero);
    }
  }
}

template <typename Body>
void each_panel(int64_t panels, const PanelLayout& layout, const Parallel& parallel,
                const Body& body) {
  const int64_t some = kColumnsPerTask / layout.columns();
  parallel.run((panels + some - 1) / some, [&](int64_t task) {
    const int64_t end = std::min(panels, (task + 1) * some);
    for (int64_t i = task * some; i < end; ++i) body(i);
  });
}

}  // namespace

void check_size(const PanelLayout& layout, int64_t n, int64_t panels, int64_t panel_bytes) {
  const int64_t count = panel_count(n, layout.columns());
  if (panels != count || panel_bytes != layout.panel_bytes()) {
    throw invalid_argument("packed weight: k = ", layout.k, ", n = ", n, ", group = ", layout.group,
                           " and ", layout.bits, " bits are a buffer of [", count, ", ",
                           layout.panel_bytes(), "] bytes, got [", panels, ", ", panel_bytes,
                           "]; pack the weight again, or pass its own k, n and group");
  }
}

void pack(const int8_t* qvalues, const void* scales, int64_t n, const PanelLayout& layout,
          uint8_t* out, int64_t panels, int64_t panel_bytes, const Parallel& parallel,
          const void* column_scales) {
  check_size(layout, n, panels, panel_bytes);
  each_panel(panels, layout, parallel, [&](int64_t i) {
    pack_panel(qvalues, static_cast<const uint8_t*>(scales),
               static_cast<const uint8_t*>(column_scales), n, layout, i, out + i * panel_bytes);
  });
}

void unpack(const uint8_t* buffer, int64_t panels, int64_t panel_bytes, int64_t n,
            const PanelLayout& layout, int8_t* qvalues, void* scales, const Parallel& parallel,
            void* column_scales) {
  check_size(layout, n, panels, panel_bytes);
  each_panel(panels, layout, parallel, [&](int64_t i) {
    unpack_panel(buffer + i * panel_bytes, n, layout, i, qvalues, static_cast<uint8_t*>(scales),
                 static_cast<uint8_t*>(column_scales));
  });
}

}  // namespace jaxtap
