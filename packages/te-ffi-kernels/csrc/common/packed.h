// The packed weight format: quantized matrices in the order in which kernels read them.
//
// A weight of K rows and N columns is ceil(N / C) panels of C columns, each of panel_bytes and each
// complete in itself, so that an array of panels can be sliced. All numbers are little-endian.
//
//   0-3    "JTWP"           8-11   K                    24-27  (sum of the words at 0..23)
//   4      version          12-15  group, 0 for none           ^ 0x9E3779B9
//   5      bits, 4 or 8     16-19  sum1 of the payload  28-63  zero
//   6      columns used     20-23  sum2 of the payload
//   7      4 bits: bits of a scale, 32 or 16; 8 bits: zero
//   64     payload
//
// 8 bits, version 1, C = 16: float scales[G][16], then the quantized values. G = K / group, or 1
// for group 0. 4 bits, version 2, C = 32: for each group scales[32], float32 or float16, then its
// quantized values. So a panel is one stream: 9 cache lines for each 32 rows with float16 scales in
// groups of 32.
//
// Quantized values of 8 bits: for each 4 rows, C columns of 4 bytes, value + 128. Quantized values
// of 4 bits: for each 8 rows, C columns of 4 bytes, whose low nibbles are the first 4 rows and
// whose high nibbles the next 4, value + 8. Columns and rows that are not there have scale 0 and
// value 0. With w_i the words of the payload, sum1 is the sum of w_i and sum2 that of (i + 1) *
// w_i.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/convert.h"
#include "common/forward.h"

namespace jaxtap {

constexpr int64_t kPanelColumns = 16;  // of 8 bits
constexpr int64_t kPanelHeader = 64;

// Where things are in a panel.
struct PanelLayout {
  int64_t k = 0;
  int64_t group = 0;  // rows that share a scale; 0: all
  int bits = 8;
  int scale_bits = 32;  // 16 in 4 bits alone

  int version() const { return bits == 8 ? 1 : 2; }
  int64_t columns() const { return bits == 8 ? kPanelColumns : 2 * kPanelColumns; }
  int64_t scales() const { return group == 0 ? 1 : k / group; }
  int64_t padded_k() const { return group == 0 ? (k + 63) / 64 * 64 : k; }
  // Of one group.
  int64_t scale_bytes() const { return columns() * scale_bits / 8; }
  // Of all rows.
  int64_t qvalues_bytes() const { return columns() * padded_k() * bits / 8; }
  int64_t panel_bytes() const { return kPanelHeader + scales() * scale_bytes() + qvalues_bytes(); }
  // In 8 bits, where all quantized values are.
  int64_t qvalues_offset() const { return kPanelHeader + scales() * scale_bytes(); }
  // Where the scales of a group are.
  int64_t scales_at(int64_t index) const {
    const int64_t qvalues = bits == 8 ? 0 : qvalues_bytes() / scales();
    return kPanelHeader + index * (scale_bytes() + qvalues);
  }
  // Where the quantized values of a row are: in byte 4 * column + row % 4 from here, and in the
  // high nibble where `high(row)`.
  int64_t qvalues_at(int64_t row) const {
    const int64_t before = bits == 8 || group == 0 ? scales() : row / group + 1;
    return kPanelHeader + before * scale_bytes() + row / (32 / bits) * 4 * columns();
  }
  bool high(int64_t row) const { return bits == 4 && row % 8 >= 4; }
};

// Throws Error (invalid argument) for bits other than 4 and 8, K out of range, a group that is no
// multiple of 8, beyond 65536 or does not divide K, and for bits of scales that there are not.
PanelLayout panel_layout(int64_t k, int64_t group, int bits, int scale_bits = 32);

inline int64_t panel_count(int64_t n, int64_t columns) {
  return (n + columns - 1) / columns;
}

// Columns that panel `index` of a weight with `n` columns uses.
inline int panel_columns(int64_t n, int64_t index, int64_t columns) {
  const int64_t rest = n - index * columns;
  return static_cast<int>(rest < columns ? rest : columns);
}

// The quantized value of a row and column of a panel.
inline int panel_value(const uint8_t* panel, const PanelLayout& layout, int64_t row, int column) {
  const int byte = panel[layout.qvalues_at(row) + 4 * column + row % 4];
  return layout.bits == 8 ? byte - 128 : (layout.high(row) ? byte >> 4 : byte & 15) - 8;
}

// One of the scales that begin at `from`, which may be unaligned.
inline float load_scale(const uint8_t* from, int scale_bits, int64_t index) {
  if (scale_bits == 16) {
    uint16_t half;
    std::memcpy(&half, from + 2 * index, 2);
    return f16_to_f32(half);
  }
  float scale;
  std::memcpy(&scale, from + 4 * index, 4);
  return scale;
}

// Writes the header of a panel whose payload is complete.
void write_panel_header(uint8_t* panel, const PanelLayout& layout, int columns);

// Checks the header: that it is of `layout` with `columns` columns used. Throws Error (invalid
// argument), which says what is wrong in panel `index`.
//
// Returns a number that stands for this payload at this address, by the header's sums. The keys of
// several panels are added up: see `check_payloads`.
uint64_t check_header(const uint8_t* panel, const PanelLayout& layout, int columns, int64_t index);

// Checks the payloads of `count` panels, whose keys add up to `key`, against the sums of their
// headers. What passed is remembered by its key, so that checking it again is one look-up, however
// many panels there are. Throws as `check_header`; `first` is the index of the first panel.
void check_payloads(const uint8_t* panels, const PanelLayout& layout, int64_t first, int64_t count,
                    uint64_t key, const Parallel& parallel);

// Readies what `check_payloads` remembers in, which it would do page by page.
void warm_panel_checks();

}  // namespace jaxtap
