// The kernel of matmuls with packed weights, of all numbers of rows.
//
// A warp has 32 columns of the weight, which are the rows of what tensor cores multiply, and a
// multiple of 8 rows of x. It goes through the weight in steps (packed_fragments.h), several of
// which are read before the first of them is multiplied.
//
// Sums of a group are multiplied with its scale when it ends, which a counter says. With kSplits
// warps for the same columns each has a part of the rows, and their sums are added up in one order,
// whatever the device does.
#include <limits>
#include <type_traits>

#include "cuda/kernels/group_of.h"
#include "cuda/kernels/packed.h"
#include "cuda/kernels/packed_fragments.h"

namespace jaxtap::cuda {
namespace {

constexpr int kTileCols = 32, kTileRows = 8;

struct MmaArgs {
  const void* x;
  const float* x_scales;
  Panels weight;
  void* y;
  te::Float y_dtype;
  int64_t m, row_blocks, tiles;
  const GroupStart* starts;  // nullptr: rows are in no groups
  int64_t row_groups;
  bool wide;  // rows of x may be read in vectors of 8
};

// How warps share the work of a block.
template <int kRowTiles_, int kAcross_, int kSplits_, int kLoads_>
struct Shape {
  static constexpr int kRowTiles = kRowTiles_, kAcross = kAcross_, kSplits = kSplits_;
  static constexpr int kLoads = kLoads_;  // of 16 bytes that a lane has in flight
  static constexpr int kThreads = kAcross * kSplits * kWarp, kRows = kRowTiles * kTileRows;
};
using FewRows = Shape<1, 1, 8, 8>;
using SomeRows = Shape<4, 2, 4, 8>;
using ManyRows = Shape<8, 4, 1, 4>;

// The rows of a block.
struct BlockRows {
  int64_t first, limit;  // there are none from `limit` on
  int64_t group;         // kNoGroup: those that no group has
  bool bad;              // the sizes of groups can't be
};
constexpr int64_t kNoGroup = -1;

template <class Shape>
JAXTAP_DEVICE BlockRows rows_of(const MmaArgs& args, int64_t tile) {
  if (args.starts == nullptr) return {tile * Shape::kRows, args.m, 0, false};
  const GroupStart last = args.starts[args.row_groups];
  const bool bad = last.row == kNoRow;
  if (tile >= last.tile) {
    return {(bad ? 0 : last.row) + (tile - last.tile) * Shape::kRows, args.m, kNoGroup, bad};
  }
  const int64_t group = group_of(args.starts, args.row_groups, tile);
  const int64_t end = args.starts[group + 1].row;
  const GroupStart start = args.starts[group];
  return {start.row + (tile - start.tile) * Shape::kRows, end < args.m ? end : args.m, group, false};
}

// Writes what rows without a weight have.
template <class Shape>
JAXTAP_DEVICE void write_without_weight(const MmaArgs& args, const BlockRows& rows, int64_t column) {
  constexpr int kCols = Shape::kAcross * kTileCols;
  const float y = rows.bad ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kRows * kCols; i += Shape::kThreads) {
    const int64_t row = rows.first + i / kCols, at = column + i % kCols;
    if (row < rows.limit && at < args.weight.n) {
      store_one(args.y_dtype, args.y, row * args.weight.n + at, y);
    }
  }
}

template <class X, int kBits, bool kGroups, class Shape>
__global__ void __launch_bounds__(Shape::kThreads) packed_mma_kernel(MmaArgs args) {
  constexpr bool kInt8 = std::is_same_v<X, Int8Values>;
  constexpr int kRowTiles = Shape::kRowTiles, kCols = kColsOf<kBits>;
  constexpr int kFlight = Shape::kLoads / Stream32<kBits>::kLoads;
  using Part = std::conditional_t<kInt8, int32_t, float>;  // exact
  using Sum = std::conditional_t<kGroups, float, Part>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, across = warp / Shape::kSplits;
  const int g = static_cast<int>(threadIdx.x) % kWarp / 4, t = static_cast<int>(threadIdx.x) % 4;
  const int64_t block = static_cast<int64_t>(blockIdx.x);
  const int64_t tile = block / args.row_blocks * Shape::kAcross + across;
  const BlockRows rows = rows_of<Shape>(args, block % args.row_blocks);
  const int64_t first = rows.first, limit = rows.limit;
  if (rows.group == kNoGroup) {
    return write_without_weight<Shape>(args, rows,
                                       block / args.row_blocks * Shape::kAcross * kTileCols);
  }
  const Panels weight = picked(args.weight, rows.group);

  // Columns that aren't there are those of the last panel, and are not written.
  const int64_t column = tile * kTileCols + 4 * g;
  const int64_t wanted = column / kCols;
  const int64_t index = wanted < weight.count ? wanted : weight.count - 1;
  const int col = static_cast<int>(column % kCols);
  const uint8_t* panel = weight.data + index * weight.bytes;

  const int64_t steps = weight.lines / Stream32<kBits>::kLines;
  const int64_t part = (steps + Shape::kSplits - 1) / Shape::kSplits;
  const int64_t begin = warp % Shape::kSplits * part;
  const int64_t end = tile >= args.tiles ? begin : begin + part < steps ? begin + part : steps;
  const int64_t group_steps = kGroups ? weight.group / kStep : steps;
  int64_t group = kGroups ? begin / group_steps : 0, left = group_steps - begin % group_steps;
  Stream32<kBits> stream = {line_of<kBits>(weight, panel, group, 0) +
                                (begin * Stream32<kBits>::kLines + t) * kLineOf<kBits> + 4 * col,
                            weight.scale_bytes, left, group_steps};

  Part sums[2][kRowTiles][4] = {};
  Sum totals[2][kRowTiles][4] = {};
  const auto finish_group = [&] {
    float scale[4];
    JAXTAP_UNROLL
    for (int c = 0; c < 4; ++c) scale[c] = scale_of<kBits>(weight, panel, group, col + c);
    JAXTAP_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      JAXTAP_UNROLL
      for (int i = 0; i < 4; ++i) {
        float factor = 1.0f;
        if constexpr (kInt8) {
          const int64_t row = first + r * kTileRows + 2 * t + i % 2;
          factor = row < limit ? args.x_scales[row * weight.groups + group] : 0.0f;
        }
        JAXTAP_UNROLL
        for (int j = 0; j < 2; ++j) {
          totals[j][r][i] += static_cast<float>(sums[j][r][i]) * factor * scale[2 * j + i / 2];
          sums[j][r][i] = 0;
        }
      }
    }
  };

  for (int64_t from = begin; from < end; from += kFlight) {
    typename Stream32<kBits>::Words ahead[kFlight] = {};
    JAXTAP_UNROLL
    for (int f = 0; f < kFlight; ++f) {
      if (from + f < end) stream.next(ahead[f]);
    }
    JAXTAP_UNROLL
    for (int f = 0; f < kFlight; ++f) {
      const int64_t step = from + f;
      if (step >= end) break;
      if constexpr (kInt8) {
        uint32_t a[2][4];
        int8_fragments<kBits>(ahead[f], a);
        JAXTAP_UNROLL
        for (int r = 0; r < kRowTiles; ++r) {
          const int64_t row = first + r * kTileRows + g;
          const int64_t words = weight.lines * kDepthOf<kBits> / 4;  // of a row of x
          const auto* x = static_cast<const uint32_t*>(args.x) + row * words;
          uint32_t b[2] = {};
          if (row < limit) {
            JAXTAP_UNROLL
            for (int half = 0; half < 2; ++half) b[half] = x[row_of<kBits>(step, t, half) / 4];
          }
          JAXTAP_UNROLL
          for (int j = 0; j < 2; ++j) mma(X(), sums[j][r], a[j], b);
        }
      } else {
        using Core = std::conditional_t<std::is_same_v<X, F32>, BF16, X>;
        constexpr int kPlanes = std::is_same_v<X, F32> ? 3 : 1;
        uint32_t a[2][2][4];
        JAXTAP_UNROLL
        for (int half = 0; half < 2; ++half) fragments<Core, kBits>(ahead[f], half, a[half]);
        JAXTAP_UNROLL
        for (int r = 0; r < kRowTiles; ++r) {
          const int64_t row = first + r * kTileRows + g;
          const auto* x = static_cast<const typename X::Type*>(args.x) + row * weight.k;
          typename X::Type numbers[2][4];
          numbers_of<X, kBits>(x, row < limit, step, t, weight.k, args.wide, numbers);
          JAXTAP_UNROLL
          for (int half = 0; half < 2; ++half) {
            uint32_t b[kPlanes][2];
            x_fragments<kBits>(numbers[half], b);
            JAXTAP_UNROLL
            for (int plane = 0; plane < kPlanes; ++plane) {
              JAXTAP_UNROLL
              for (int j = 0; j < 2; ++j) mma(Core(), sums[j][r], a[half][j], b[plane]);
            }
          }
        }
      }
      if constexpr (kGroups) {
        if (--left != 0) continue;
        finish_group();
        ++group;
        left = group_steps;
      }
    }
  }
  if constexpr (kGroups) {
    if (end > begin && left != group_steps) finish_group();
  } else {
    JAXTAP_UNROLL
    for (int j = 0; j < 2; ++j) {
      JAXTAP_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        JAXTAP_UNROLL
        for (int i = 0; i < 4; ++i) totals[j][r][i] = sums[j][r][i];
      }
    }
  }

  const auto write_one = [&](int64_t row, int64_t at, Sum sum) {
    if (row >= limit || at >= weight.n) return;
    float y = static_cast<float>(sum);
    const int64_t of = at / kCols;
    if constexpr (!kGroups) {
      if constexpr (kInt8) y *= args.x_scales[row];
      y *= scale_of<kBits>(weight, weight.data + of * weight.bytes, 0, static_cast<int>(at % kCols));
    }
    if (!fits(weight, of)) y = std::numeric_limits<float>::quiet_NaN();
    store_one(args.y_dtype, args.y, row * weight.n + at, y);
  };
  if constexpr (Shape::kSplits == 1) {
    JAXTAP_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      JAXTAP_UNROLL
      for (int i = 0; i < 4; ++i) {
        JAXTAP_UNROLL
        for (int j = 0; j < 2; ++j) {
          write_one(first + r * kTileRows + 2 * t + i % 2, column + 2 * j + i / 2,
                    totals[j][r][i]);
        }
      }
    }
  } else {
    __shared__ Sum of_warps[Shape::kAcross * Shape::kSplits][Shape::kRows][kTileCols];
    JAXTAP_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      JAXTAP_UNROLL
      for (int i = 0; i < 4; ++i) {
        JAXTAP_UNROLL
        for (int j = 0; j < 2; ++j) {
          of_warps[warp][r * kTileRows + 2 * t + i % 2][4 * g + 2 * j + i / 2] = totals[j][r][i];
        }
      }
    }
    __syncthreads();
    constexpr int kOfTile = Shape::kRows * kTileCols;
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kAcross * kOfTile;
         i += Shape::kThreads) {
      const int which = i / kOfTile, row = i % kOfTile / kTileCols, at = i % kTileCols;
      Sum sum = 0;
      JAXTAP_UNROLL
      for (int s = 0; s < Shape::kSplits; ++s) {
        sum += of_warps[which * Shape::kSplits + s][row][at];
      }
      write_one(first + row, (block / args.row_blocks * Shape::kAcross + which) * kTileCols + at,
                sum);
    }
  }
}

template <class X, int kBits, bool kGroups, class Shape>
void run_shape(const PackedMma& given, MmaArgs args, Stream stream) {
  if (given.row_groups == kOneGroup) {
    args.row_blocks = ceil_of(args.m, Shape::kRows);
  } else {
    GroupSizes sizes;
    sizes.sizes = given.sizes;
    sizes.groups = given.row_groups;
    sizes.length = given.m;
    sizes.may_exceed = true;
    sizes.tile = Shape::kRows;
    find_group_starts(sizes, given.starts, stream);
    args.row_blocks = most_tiles(given.m, given.row_groups, Shape::kRows);
  }
  launch(packed_mma_kernel<X, kBits, kGroups, Shape>,
         ceil_of(args.tiles, Shape::kAcross) * args.row_blocks, Shape::kThreads, stream, args);
}

template <class X, int kBits, bool kGroups>
void run_rows(const PackedMma& given, const MmaArgs& args, Stream stream) {
  constexpr int64_t kSome = 128;
  // Of a group, if all have as many.
  const int64_t rows = given.row_groups > 0 ? ceil_of(args.m, given.row_groups) : args.m;
  if (rows <= FewRows::kRows) return run_shape<X, kBits, kGroups, FewRows>(given, args, stream);
  if (rows <= kSome) return run_shape<X, kBits, kGroups, SomeRows>(given, args, stream);
  run_shape<X, kBits, kGroups, ManyRows>(given, args, stream);
}

template <class X, int kBits>
void run_bits(const PackedMma& given, const MmaArgs& args, Stream stream) {
  if (args.weight.group == 0) return run_rows<X, kBits, false>(given, args, stream);
  run_rows<X, kBits, true>(given, args, stream);
}

template <class X>
void run_mma(const PackedMma& given, Stream stream) {
  MmaArgs args = {};
  args.x = given.x;
  args.x_scales = given.x_scales;
  args.weight = panels_of(given.weight, given.layout, given.n, given.stack);
  args.y = given.y;
  args.y_dtype = given.y_dtype;
  args.m = given.m;
  args.tiles = ceil_of(given.n, kTileCols);
  args.starts = given.row_groups == kOneGroup ? nullptr : given.starts;
  args.row_groups = given.row_groups;
  args.wide = given.layout.k % 4 == 0 &&
              aligned(4 * sizeof(typename X::Type), static_cast<const char*>(given.x));
  if (given.layout.bits == 8) return run_bits<X, 8>(given, args, stream);
  run_bits<X, 4>(given, args, stream);
}

}  // namespace
}  // namespace jaxtap::cuda
