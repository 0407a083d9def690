// The packed weight format, version 1: quantized matrices in the order in which kernels read them.
//
// A weight of K rows and N columns is ceil(N / 16) panels of 16 columns, each of panel_bytes and
// each complete in itself, so that an array of panels can be sliced. All numbers are little-endian.
//
//   0-3    "JTWP"           8-11   K                    24-27  (sum of the words at 0..23)
//   4      version, 1       12-15  group, 0 for none           ^ 0x9E3779B9
//   5      bits, 4 or 8     16-19  sum1 of the payload  28-63  zero
//   6      columns used     20-23  sum2 of the payload
//   7      zero
//   64     payload: float scales[G][16], then the codes
//
// G = K / group, or 1 for group 0. Codes of 8 bits: for each 4 rows, 16 columns of 4 bytes, code +
// 128. Codes of 4 bits: for each 8 rows, 16 columns of 4 bytes, whose low nibbles are the first 4
// rows and whose high nibbles the next 4, code + 8. Columns and rows that are not there have scale
// 0 and code 0. With w_i the words of the payload, sum1 is the sum of w_i and sum2 that of
// (i + 1) * w_i.
#pragma once

#include <cstdint>

namespace jaxtap {

constexpr int64_t kPanelColumns = 16;
constexpr int64_t kPanelHeader = 64;

// Where things are in a panel.
struct PanelLayout {
  int64_t k = 0;
  int64_t group = 0;  // rows that share a scale; 0: all
  int bits = 8;

  int64_t scales() const { return group == 0 ? 1 : k / group; }
  int64_t padded_k() const { return group == 0 ? (k + 63) / 64 * 64 : k; }
  int64_t codes_offset() const { return kPanelHeader + 4 * kPanelColumns * scales(); }
  int64_t codes_bytes() const { return kPanelColumns * padded_k() * bits / 8; }
  int64_t panel_bytes() const { return codes_offset() + codes_bytes(); }
};

// Throws Error (invalid argument) for bits other than 4 and 8, K out of range, or a group that is
// no multiple of 8, beyond 65536 or does not divide K.
PanelLayout panel_layout(int64_t k, int64_t group, int bits);

inline int64_t panel_count(int64_t n) { return (n + kPanelColumns - 1) / kPanelColumns; }

// Columns that panel `index` of a weight with `n` columns uses.
inline int panel_columns(int64_t n, int64_t index) {
  const int64_t rest = n - index * kPanelColumns;
  return static_cast<int>(rest < kPanelColumns ? rest : kPanelColumns);
}

// Writes the header of a panel whose payload is complete.
void write_panel_header(uint8_t* panel, const PanelLayout& layout, int columns);

// Parts of a panel. No alignment is promised.
struct PanelView {
  const uint8_t* scales;  // float32[scales()][16]
  const uint8_t* codes;
  int columns;
};

// Checks the header and that it is of `layout` with `columns` columns used. Throws Error (invalid
// argument), which says what is wrong in panel `index`.
PanelView open_panel(const uint8_t* panel, const PanelLayout& layout, int columns, int64_t index);

// Checks the payload against the sums of the header. A panel that passed is remembered by its
// address and sums, so that checking it again costs next to nothing. Throws as `open_panel`.
void check_panel_payload(const uint8_t* panel, const PanelLayout& layout, int64_t index);

// Readies what `check_panel_payload` remembers in, which it would do page by page.
void warm_panel_checks();

}  // namespace jaxtap
