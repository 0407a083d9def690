// What one instruction set offers to TE's operations: loops over rows of numbers. Each is compiled
// once per instruction set (te/isa), and reached through the table of the one that was chosen.
//
// Numbers outside of a loop's arrays are never read or written, at any length and alignment.
#pragma once

#include <cstdint>

namespace jaxtap::te {

// Formats of quantized values; also the index into the tables.
enum class QType { kE4M3 = 0, kE5M2 = 1, kInt8 = 2 };

// Formats of floating point arrays; also the index into the tables.
enum class Float { kF32 = 0, kBF16 = 1, kF16 = 2 };
constexpr int64_t bytes_of(Float dtype) { return dtype == Float::kF32 ? 4 : 2; }

constexpr int kBlock = 32;  // numbers that share an MX scale
constexpr int kTile = 64;   // the largest side that `transpose` takes

struct Table {
  // From and to float32, rounding half to even. int8 is converted as numbers.
  void (*load[3])(const void* in, float* out, int64_t count);
  void (*store[3])(const float* in, void* out, int64_t count);
  void (*decode[3])(const uint8_t* in, float* out, int64_t count);

  // Quantized values of in * factor, with one factor or one for each. They saturate. NaN becomes
  // NaN (0x7f) in float8, and 0 in int8.
  void (*encode[3])(const float* in, uint8_t* out, int64_t count, float factor);
  void (*encode_each[3])(const float* in, uint8_t* out, int64_t count, const float* factors);

  // MX: scales are powers of two, biased by 127 (e8m0). A row of blocks, and one row of 32 rows
  // whose columns are blocks, with factors from `block_scales`.
  void (*encode_blocks[3])(const float* in, uint8_t* out, int64_t count, uint8_t* scales);
  void (*encode_times_each[3])(const float* in, uint8_t* out, int64_t count, const float* factors,
                               const float* halves);
  void (*block_scales[3])(const int32_t* absmax, int64_t count, uint8_t* scales, float* factors,
                          float* halves);
  // In place: row *= scale of its block; row *= scale of its column.
  void (*scale_blocks)(float* row, int64_t count, const uint8_t* scales);
  void (*scale_columns)(float* row, int64_t count, const uint8_t* scales);

  // The largest magnitude as the bits of a float32, not counting NaN and subnormal numbers.
  int32_t (*absmax)(const float* in, int64_t count);
  // The same per column, as the maximum with what is there; subnormal numbers do count.
  void (*absmax_each)(const float* in, int32_t* most, int64_t count);
  // sum += in
  void (*add)(const float* in, float* sum, int64_t count);
  void (*multiply)(float* row, int64_t count, float factor);
  void (*multiply_each)(float* row, int64_t count, const float* factors);

  // out[c][r] = in[r][c], of bytes; rows and cols up to kTile. `past_caches` for results that are
  // larger than these; a thread that asked for it calls `fence` in the end.
  void (*transpose)(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride,
                    int64_t rows, int64_t cols, bool past_caches);
  void (*fence)();

  // c[tile_rows][tile_cols] += a b, with a as [k][tile_rows] and b as [k][tile_cols]. With `first`
  // c is overwritten.
  void (*matmul)(int64_t k, const float* a, const float* b, float* c, int64_t stride, bool first);
  int tile_rows;
  int tile_cols;
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::te
