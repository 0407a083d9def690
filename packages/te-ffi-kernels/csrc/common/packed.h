// The packed weight format: quantized matrices in the order in which kernels read them.
//
// A weight of K rows and N columns is ceil(N / C) panels of C columns, each of panel_bytes and each
// complete in itself, so that an array of panels can be sliced. All numbers are little-endian.
//
//   0-3    "JTWP"           8-11   K                    24-27  (sum of the words at 0..23)
//   4      version          12-15  group, 0 for none           ^ 0x9E3779B9
//   5      bits, 4 or 8     16-19  sum1 of the payload  28-63  zero
//   6      columns used     20-23  sum2 of the payload
//   7      version 2: bits of a scale, 32 or 16; version 3: kind of scale + 16 * table
//   64     payload
//
// 8 bits, version 1, C = 16: float scales[G][16], then the quantized values. G = K / group, or 1
// for group 0. 4 bits, version 2, C = 32: for each group scales[32], float32 or float16, then its
// quantized values. So a panel is one stream: 9 cache lines for each 32 rows with float16 scales in
// groups of 32. 4 bits, version 3: the same with numbers of a table, and scales that may have 8
// bits; those of float8_e4m3fn come after float[32], with which the scales of a column are
// multiplied. The payload is filled up with zeros to whole lines of 64 bytes.
//
// Quantized values of 8 bits: for each 4 rows, C columns of 4 bytes, value + 128. Quantized values
// of 4 bits: for each 8 rows, C columns of 4 bytes, whose low nibbles are the first 4 rows and
// whose high nibbles the next 4: value + 8 in version 2, the place in the table in version 3.
// Columns and rows that are not there have scale 0 and value or place 0. With w_i the words of the
// payload, sum1 is the sum of w_i and sum2 that of (i + 1) * w_i.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/convert.h"
#include "common/forward.h"

namespace jaxtap {

constexpr int64_t kPanelColumns = 16;  // of 8 bits
constexpr int64_t kPanelHeader = 64;

// The numbers that the 16 quantized values of 4 bits stand for: `values` times `factor`.
//
// They are multiplied as bytes. A number beyond a byte has two `parts`, 256 * high + low, which are
// multiplied and rescaled as if they were two groups with the same rows of x.
struct Table {
  const char* name = "";
  int zero_point = 0;  // what makes bytes unsigned
  float factor = 1.0f;
  int16_t values[16] = {};
  int parts = 1;
  uint8_t bytes[2][16] = {};  // of each part, the high one first, plus the zero point
  float factors[2] = {};      // of each part
  int most = 0;               // largest magnitude of a byte without the zero point

  // Whether four products with int8 fit int16.
  constexpr bool is_small() const { return zero_point + most < 64; }
};

constexpr Table table_of(const char* name, int zero_point, float factor, const int16_t (&values)[16]) {
  Table t;
  t.name = name;
  t.zero_point = zero_point;
  t.factor = factor;
  for (int16_t value : values) t.parts = value < -128 || value > 127 ? 2 : t.parts;
  t.factors[0] = t.parts == 2 ? 256 * factor : factor;
  t.factors[1] = factor;
  for (int i = 0; i < 16; ++i) {
    t.values[i] = values[i];
    const int low = (values[i] + 128 + 256 * 256) % 256 - 128;
    const int parts[2] = {t.parts == 2 ? (values[i] - low) / 256 : values[i], low};
    for (int part = 0; part < t.parts; ++part) {
      const int magnitude = parts[part] < 0 ? -parts[part] : parts[part];
      t.most = magnitude > t.most ? magnitude : t.most;
      t.bytes[part][i] = static_cast<uint8_t>(parts[part] + zero_point);
    }
  }
  return t;
}

// By their numbers in headers and attributes.
inline constexpr Table kTables[] = {
    table_of("int4", 8, 1.0f, {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}),
    // E2M1 of the OCP Microscaling Formats, doubled.
    table_of("e2m1", 12, 0.5f, {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}),
    // llama.cpp's IQ4_NL.
    table_of("iq4_nl", 128, 1.0f,
             {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}),
    // The 4-bit NormalFloat of QLoRA (arXiv:2305.14314), rounded to multiples of what is nearest to
    // all of them: 8e-6 at most.
    table_of("nf4", 128, 1.0f / 31908,
             {-31908, -22214, -16754, -12601, -9076, -5896, -2905, 0, 2539, 5135, 7853, 10782, 14062,
              17952, 23068, 31908})};
constexpr int kTableCount = sizeof(kTables) / sizeof(Table);

enum class ScaleKind : int { kF32, kF16, kE8M0, kE4M3 };
constexpr int kScaleKinds = 4;

// Where things are in a panel.
struct PanelLayout {
  int64_t k = 0;
  int64_t group = 0;  // rows that share a scale; 0: all
  int bits = 8;
  ScaleKind scale_kind = ScaleKind::kF32;  // others in 4 bits alone
  int table_id = 0;                        // in kTables; of 4 bits

  int version() const { return bits == 8 ? 1 : table_id == 0 ? 2 : 3; }
  const Table& table() const { return kTables[table_id]; }
  int scale_bits() const {
    return scale_kind == ScaleKind::kF32 ? 32 : scale_kind == ScaleKind::kF16 ? 16 : 8;
  }
  // What the header says beside the bits of a value.
  int kind() const {
    if (bits == 8) return 0;
    return table_id == 0 ? scale_bits() : static_cast<int>(scale_kind) + 16 * table_id;
  }
  int64_t columns() const { return bits == 8 ? kPanelColumns : 2 * kPanelColumns; }
  int64_t scales() const { return group == 0 ? 1 : k / group; }
  int64_t padded_k() const { return group == 0 ? (k + 63) / 64 * 64 : k; }
  // Of one group.
  int64_t scale_bytes() const { return columns() * scale_bits() / 8; }
  // What the scales of each column are multiplied with.
  bool has_column_scales() const { return scale_kind == ScaleKind::kE4M3; }
  int64_t column_bytes() const { return has_column_scales() ? 4 * columns() : 0; }
  // Of all rows.
  int64_t qvalues_bytes() const { return columns() * padded_k() * bits / 8; }
  int64_t panel_bytes() const {
    const int64_t payload = column_bytes() + scales() * scale_bytes() + qvalues_bytes();
    return kPanelHeader + (payload + 63) / 64 * 64;
  }
  // In 8 bits, where all quantized values are.
  int64_t qvalues_offset() const { return kPanelHeader + scales() * scale_bytes(); }
  // Where the scales of a group are.
  int64_t scales_at(int64_t index) const {
    const int64_t qvalues = bits == 8 ? 0 : qvalues_bytes() / scales();
    return kPanelHeader + column_bytes() + index * (scale_bytes() + qvalues);
  }
  // Where the quantized values of a row are: in byte 4 * column + row % 4 from here, and in the
  // high nibble where `high(row)`.
  int64_t qvalues_at(int64_t row) const {
    const int64_t before = bits == 8 || group == 0 ? scales() : row / group + 1;
    return kPanelHeader + column_bytes() + before * scale_bytes() +
           row / (32 / bits) * 4 * columns();
  }
  bool high(int64_t row) const { return bits == 4 && row % 8 >= 4; }
};

// Throws Error (invalid argument) for bits other than 4 and 8, K out of range, a group that is no
// multiple of 8, beyond 65536 or does not divide K, and for tables and scales that there are not.
PanelLayout panel_layout(int64_t k, int64_t group, int bits,
                         ScaleKind scale_kind = ScaleKind::kF32, int table_id = 0);

inline int64_t panel_count(int64_t n, int64_t columns) {
  return (n + columns - 1) / columns;
}

// Columns that panel `index` of a weight with `n` columns uses.
inline int panel_columns(int64_t n, int64_t index, int64_t columns) {
  const int64_t rest = n - index * columns;
  return static_cast<int>(rest < columns ? rest : columns);
}

// The quantized value of a row and column of a panel: in 4 bits the place in the table.
inline int panel_value(const uint8_t* panel, const PanelLayout& layout, int64_t row, int column) {
  const int byte = panel[layout.qvalues_at(row) + 4 * column + row % 4];
  return layout.bits == 8 ? byte - 128 : layout.high(row) ? byte >> 4 : byte & 15;
}

// What that stands for, as an integer: `panel_scale` has the table's factor.
inline int panel_number(const uint8_t* panel, const PanelLayout& layout, int64_t row, int column) {
  const int value = panel_value(panel, layout, row, column);
  return layout.bits == 8 ? value : layout.table().values[value];
}

// The scale of a group and column of a panel, times the factor of the table.
inline float panel_scale(const uint8_t* panel, const PanelLayout& layout, int64_t group,
                         int64_t column) {
  const uint8_t* from = panel + layout.scales_at(group) + column * layout.scale_bits() / 8;
  float scale;
  uint16_t half;
  switch (layout.scale_kind) {
    case ScaleKind::kF16:
      std::memcpy(&half, from, 2);
      scale = f16_to_f32(half);
      break;
    case ScaleKind::kE8M0:
      scale = e8m0_to_f32(*from);
      break;
    case ScaleKind::kE4M3:
      std::memcpy(&scale, panel + kPanelHeader + 4 * column, 4);
      scale *= f8e4m3fn_to_f32(*from);
      break;
    default:
      std::memcpy(&scale, from, 4);
  }
  return scale * (layout.bits == 8 ? 1.0f : layout.table().factor);
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
