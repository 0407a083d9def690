// The inner kernel of products in float32. A sum of products is rounded as the machine's
// multiply-add does it: the references don't promise these bits.

#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif

#include "common/register_tile.h"
#include "te/isa/table.h"

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif

void matmul(int64_t k, const float* a, const float* b, float* c, int64_t stride, bool first) {
  tile::multiply_tile<tile::Products, kRows, tile::kVectors, tile::Left::kByColumn, false>(
      k, a, kRows, b, tile::kCols, c, stride, !first);
}

}  // namespace

void set_matmul(Table& table) {
  table.matmul = matmul;
  table.tile_rows = kRows;
  table.tile_cols = tile::kCols;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
