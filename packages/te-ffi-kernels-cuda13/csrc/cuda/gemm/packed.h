// Matmuls with packed weights, as many rows as there may be.
//
// A kernel on tensor cores reads the panels. For more rows cuBLASLt multiplies, and the weight is
// unpacked into the workspace. Without groups these are quantized values, which are exact in any
// dtype, and a kernel finishes: scales, rounded once. With groups they are dequantized, rounded to
// 16 bits as the weights of a model in 16 bits are; rows that the op quantizes are rounded to what
// they mean. Both go by columns, as many at a time as kMostUnpacked bytes of workspace hold: the
// head of a language model would take a gigabyte at once.
#pragma once

#include <memory>

#include "common/packed.h"
#include "cuda/cublaslt.h"
#include "cuda/kernels/packed.h"
#include "cuda/runtime.h"
#include "te/table.h"

namespace jaxtap::cuda {

struct PackedMatmul {
  const void* x = nullptr;  // [m, k]
  te::Float x_dtype = te::Float::kF32;
  int64_t m = 0, n = 0;
  PanelLayout layout;
  bool quantizes = false;  // x to int8; else it's multiplied as it is
  const uint8_t* weight = nullptr;
  PackedStack stack;
  void* y = nullptr;  // [m, n]
  te::Float y_dtype = te::Float::kF32;
  const int32_t* sizes = nullptr;  // of groups of rows, each with the weight of its index
  int64_t row_groups = kOneGroup;
  size_t most = 0;  // bytes of the weight that are unpacked at a time; 0: kMostUnpacked
};

constexpr size_t kMostUnpacked = size_t{256} << 20;

// What a matmul takes, which follows from shapes and dtypes alone.
struct PackedWorkspace {
  explicit PackedWorkspace(const PackedMatmul& args);

  bool empty = false;
  bool library = false;  // cuBLASLt multiplies; rows in groups it doesn't
  bool exact = false;    // it multiplies int8
  bool rounds = false;   // it multiplies dequantized values
  te::Float wide = te::Float::kBF16;  // what it multiplies else
  bool finishes = false, keeps_sums = false;  // a kernel makes the result of sums: in place, or apart
  int64_t depth = 0, cols = 0;   // of the unpacked weight
  int64_t chunk = 0;             // columns at a time: whole panels
  int64_t rows = 0;              // of x in cuBLASLt's matmul
  int64_t stride = 0;            // of rows of sums

  // Where parts of the workspace begin, and the bytes of all. What is left is cuBLASLt's.
  size_t starts = 0, qvalues = 0, row_factors = 0, weight = 0, col_factors = 0, sums = 0, bytes = 0;
};

// Up to so many rows the kernel multiplies. Beyond, unpacking takes less than it saves.
constexpr int64_t kFewRows = 16;

constexpr int64_t kGroupRows = 32;  // groups have a multiple of these

// The most rows of a weight without groups whose products with int8 are exact in int32.
constexpr int64_t kMostExact = (int64_t{1} << 17) - 64;

// Sums of products by cuBLASLt: planned once per call site and device.
class PackedSums {
 public:
  // Takes from `args` everything but addresses. `workspace` is what there will be of all.
  PackedSums(CublasLt& lt, LtHandle handle, const PackedMatmul& args, size_t workspace);

  // sums[m, cols] = x[m, depth] times weight[cols, depth], where cols are those of a chunk: all but
  // the last have as many.
  void run(const void* x, const void* weight, int64_t cols, void* sums, char* workspace,
           Stream stream) const;

  size_t workspace() const;

 private:
  // A matmul with so many columns.
  struct Chunk {
    explicit Chunk(CublasLt& lt) : weight(lt), sums(lt) {}
    int64_t cols = 0;
    OwnedLayout weight, sums;
    LtAlgorithm algorithm = {};
    size_t workspace = 0;
  };

  LtCall call(const Chunk& chunk) const;

  CublasLt& lt_;
  const LtHandle handle_;
  const bool exact_;  // sums of int8
  OwnedMatmul matmul_;
  OwnedLayout x_;
  std::unique_ptr<Chunk> chunk_, last_;  // the last one where it has fewer columns
};

// `sums` is there where the steps say so.
void packed_matmul(const PackedMatmul& args, const PackedSums* sums, void* workspace,
                    size_t bytes, Stream stream);

}  // namespace jaxtap::cuda
