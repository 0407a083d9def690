// What is done before and after cuBLASLt's matmuls.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"
#include "te/modes.h"

namespace jaxtap::cuda {

// Quantized values as [out_lanes, out_k], with zeros beyond [lanes, k]; out_k is a multiple of 16.
struct GemmArrange {
  const uint8_t* qvalues = nullptr;  // [lanes, k], or [k, lanes]
  bool k_is_last = true;
  int64_t lanes = 0, k = 0;
  uint8_t* out = nullptr;
  int64_t out_lanes = 0, out_k = 0;
};

constexpr int64_t kScaleLanes = 128, kScaleBlocks = 4;

// Scales of MX blocks in cuBLASLt's order. Tiles of 128 lanes and 4 blocks follow each other along
// the blocks, then along the lanes. In a tile, lane l's block b is at l % 32 * 16 + l / 32 * 4 + b.
// What isn't there is 0.
struct GemmScales {
  const uint8_t* scales = nullptr;  // [lanes, blocks], or [blocks, lanes]
  bool k_is_last = true;
  int64_t lanes = 0, blocks = 0;
  uint8_t* out = nullptr;
};

// Alpha times the scales of tensors, NaN where beta isn't 0; and 0.
struct GemmFactors {
  const float* alpha = nullptr;
  const float* beta = nullptr;
  const float* lhs_scale = nullptr;  // nullptr: none
  const float* rhs_scale = nullptr;
  float* out = nullptr;  // [2]
};

// From sums of products to the result: scales, alpha, bias, gelu, rounded once. NaN where beta
// isn't 0. The result may be where the sums are if both have 4 bytes and the same stride.
struct GemmFinish {
  const void* sums = nullptr;  // float32, or int32: [m, stride]
  bool exact = false;          // int32
  int64_t m = 0, n = 0, stride = 0;
  bool per_lane = false;              // scales are [m] and [n], not [1]
  const float* lhs_scales = nullptr;  // nullptr: none
  const float* rhs_scales = nullptr;
  const float* alpha = nullptr;       // nullptr: 1
  const float* beta = nullptr;        // nullptr: 0
  const void* bias = nullptr;         // of `dtype` [n], or none
  bool gelu = false;
  void* out = nullptr;                // [m, out_stride]
  int64_t out_stride = 0;             // 0: n
  te::Float dtype = te::Float::kF32;
};

void transpose_and_pad(const GemmArrange& args, Stream stream);
void gemm_scales(const GemmScales& args, Stream stream);
void gemm_factors(const GemmFactors& args, Stream stream);
void gemm_finish(const GemmFinish& args, Stream stream);

}  // namespace jaxtap::cuda
