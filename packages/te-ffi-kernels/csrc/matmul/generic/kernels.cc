// Kernels in plain C++, for any machine. Compile with: -O3 -ffp-contract=off
#include "matmul/kernels.h"

#include "common/convert.h"
#include "matmul/scales.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"
#include "matmul/finish.inl"
#include "matmul/rotate.inl"

// Adds the products of one plane row and the 16 columns of a panel over `k` rows of K. Unsigned, so
// that passing the ends of int32 on the way is defined and the sums are right in the end.
JAXTAP_INLINE void add_products(const int8_t* x, const uint8_t* qvalues, int64_t k, uint32_t* acc) {
  for (int64_t i = 0; i < k; i += 4, qvalues += 64) {
    const int32_t x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
    for (int c = 0; c < 16; ++c) {
      const int32_t sum = x0 * qvalues[4 * c] + x1 * qvalues[4 * c + 1] + x2 * qvalues[4 * c + 2] +
                          x3 * qvalues[4 * c + 3];
      acc[c] += static_cast<uint32_t>(sum);
    }
  }
}

void exact8(const Tile& t) {
  for (int64_t p = 0; p < t.panels; ++p) {
    for (int64_t r = 0; r < t.rows; ++r) {
      int32_t* out = t.sums + r * t.sums_stride + 16 * p;
      uint32_t acc[16];
      for (int c = 0; c < 16; ++c) {
        acc[c] = t.first ? 0u - static_cast<uint32_t>(t.offsets[r * t.offsets_stride])
                         : static_cast<uint32_t>(out[c]);
      }
      const uint8_t* qvalues = t.qvalues + p * t.qvalues_stride;
      for (int64_t run = 0; run < t.runs; ++run, qvalues += 16 * t.k) {
        add_products(t.x + r * t.x_stride + t.x_runs[run], qvalues, t.k, acc);
      }
      for (int c = 0; c < 16; ++c) out[c] = static_cast<int32_t>(acc[c]);
    }
  }
}

void scaled8(const Tile& t) {
  for (int64_t p = 0; p < t.panels; ++p) {
    for (int64_t r = 0; r < t.rows; ++r) {
      const int32_t* offsets = t.offsets + r * t.offsets_stride;
      const float* x_scales = t.x_scales == nullptr ? nullptr : t.x_scales + r * t.offsets_stride;
      const uint8_t* scales = t.scales + p * t.scales_stride;
      float totals[16] = {};
      for (int64_t i = 0; i < t.k; i += t.segment_k, ++offsets, scales += t.scales_step) {
        uint32_t acc[16];
        for (int c = 0; c < 16; ++c) acc[c] = 0u - static_cast<uint32_t>(*offsets);
        const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
        add_products(t.x + r * t.x_stride + i, t.qvalues + p * t.qvalues_stride + 16 * i, count, acc);
        float scale[16];
        __builtin_memcpy(scale, scales, 64);
        const float x_scale = x_scales == nullptr ? 1.0f : *x_scales++;
        for (int c = 0; c < 16; ++c) {
          totals[c] += static_cast<float>(static_cast<int32_t>(acc[c])) * x_scale * scale[c];
        }
      }
      __builtin_memcpy(t.totals + r * t.sums_stride + 16 * p, totals, 64);
    }
  }
}

void paired8(const Tile& t) {
  for (int64_t p = 0; p < t.panels; ++p) {
    for (int64_t r = 0; r < t.rows; r += 2) {
      const int32_t* offsets = t.offsets + r * t.offsets_stride;
      const float* x_scales = t.x_scales + r / 2 * t.offsets_stride;
      const uint8_t* scales = t.scales + p * t.scales_stride;
      float totals[16] = {};
      for (int64_t i = 0; i < t.k; i += t.segment_k, ++offsets, scales += t.scales_step) {
        const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
        uint32_t acc[2][16];
        for (int plane = 0; plane < 2; ++plane) {
          const uint32_t offset = static_cast<uint32_t>(offsets[plane * t.offsets_stride]);
          for (int c = 0; c < 16; ++c) acc[plane][c] = 0u - offset;
          add_products(t.x + (r + plane) * t.x_stride + i, t.qvalues + p * t.qvalues_stride + 16 * i,
                       count, acc[plane]);
        }
        float scale[16];
        __builtin_memcpy(scale, scales, 64);
        const float x_scale = *x_scales++;
        for (int c = 0; c < 16; ++c) {
          const float sum = paired_sum(static_cast<int32_t>(acc[0][c]),
                                       static_cast<int32_t>(acc[1][c]), t.whole);
          totals[c] += sum * x_scale * scale[c];
        }
      }
      __builtin_memcpy(t.totals + r / 2 * t.sums_stride + 16 * p, totals, 64);
    }
  }
}

template <bool kTable, int kRows>
JAXTAP_INLINE void nibble_sums(const Table& table, int part, const int8_t* x, int64_t x_stride,
                               const uint8_t* qvalues, int64_t k, const int32_t* offsets,
                               int64_t offsets_stride, int32_t (*sums)[32]) {
  const uint8_t* bytes = table.bytes[part];
  for (int r = 0; r < kRows; ++r, x += x_stride) {
    uint32_t acc[32];
    for (int c = 0; c < 32; ++c) acc[c] = 0u - static_cast<uint32_t>(offsets[r * offsets_stride]);
    const uint8_t* line = qvalues;
    for (int64_t i = 0; i < k; i += 8, line += 128) {
      for (int j = 0; j < 4; ++j) {
        const int32_t low = x[i + j], high = x[i + 4 + j];
        for (int c = 0; c < 32; ++c) {
          const int32_t byte = line[4 * c + j];
          const int32_t first = kTable ? bytes[byte & 15] : byte & 15;
          const int32_t second = kTable ? bytes[byte >> 4] : byte >> 4;
          acc[c] += static_cast<uint32_t>(low * first + high * second);
        }
      }
    }
    __builtin_memcpy(sums[r], acc, sizeof(acc));
  }
}

#include "matmul/stream.inl"

}  // namespace

const Kernels& generic_kernels() {
  static constexpr Kernels kKernels = {
      1,            4096,           30000,   1,               false,   false,  exact8,
      scaled8,      paired8,        nullptr, expand_panel<false>, nullptr, stream, rotate_row,
      quantize_row, quantize_pairs, finish,  nullptr};
  return kKernels;
}

}  // namespace jaxtap
