// Attention in bfloat16 on AMX: pairs multiplied by tiles.

// Of a panel: two tiles.
#define JAXTAP_COLUMNS 32

#include "attention/isa/pairs.h"
// After it, which says how multiply-adds are compiled.
#include "common/amx_tile.h"

#if defined(__AVX512F__)
#define JAXTAP_BASE avx512
#else
#define JAXTAP_BASE generic
#endif

namespace jaxtap::attention::JAXTAP_BASE {
const Table& make_table();
}

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kTile = 16;  // lines of a tile, and numbers of 4 bytes in a line

// All tiles whole, from its birth to its end.
class Configured {
 public:
  Configured() {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.set(i, kTile, 4 * kTile);
    tile_configure(config);
  }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
  ~Configured() { tile_release(); }
};

// Of up to 2 by 2 tiles of c: tiles 0 to 3 are sums, 4 and 5 rows of a, 6 and 7 columns of b.
template <bool kTwoRows, bool kTwoColumns>
inline void multiply_tiles(int64_t depth, const float* a, int64_t a_stride, const float* b,
                           int64_t b_stride, float* c, int64_t c_stride, bool add) {
  const int64_t a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, c_bytes = 4 * c_stride;
  float* second = c + kTile * c_stride;
  if (add) {
    tile_load<0>(c, c_bytes);
    if (kTwoColumns) tile_load<1>(c + kTile, c_bytes);
    if (kTwoRows) tile_load<2>(second, c_bytes);
    if (kTwoRows && kTwoColumns) tile_load<3>(second + kTile, c_bytes);
  } else {
    tile_zero<0>();
    if (kTwoColumns) tile_zero<1>();
    if (kTwoRows) tile_zero<2>();
    if (kTwoRows && kTwoColumns) tile_zero<3>();
  }
  for (int64_t k = 0; k < depth; k += kTile) {
    tile_load<6>(b + k * b_stride, b_bytes);
    tile_load<4>(a + k, a_bytes);
    tile_multiply_bf16<0, 4, 6>();
    if (kTwoColumns) {
      tile_load<7>(b + k * b_stride + kTile, b_bytes);
      tile_multiply_bf16<1, 4, 7>();
    }
    if (kTwoRows) {
      tile_load<5>(a + kTile * a_stride + k, a_bytes);
      tile_multiply_bf16<2, 5, 6>();
      if (kTwoColumns) tile_multiply_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(c, c_bytes);
  if (kTwoColumns) tile_store<1>(c + kTile, c_bytes);
  if (kTwoRows) tile_store<2>(second, c_bytes);
  if (kTwoRows && kTwoColumns) tile_store<3>(second + kTile, c_bytes);
}

// AMX: all sizes are padded to whole tiles.
struct Tiles {
  using Scope = Configured;
  static constexpr int64_t kStep = 2 * kTile;  // keys that fill a tile with pairs

  static int64_t lines(int64_t size) { return whole(size); }

  // All sizes are multiples of kTile.
  static void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a,
                       int64_t a_stride, const float* b, int64_t b_stride, float* c,
                       int64_t c_stride, bool add) {
    for (int64_t r = 0; r < rows; r += 2 * kTile) {
      const float* left = a + r * a_stride;
      float* to = c + r * c_stride;
      for (int64_t col = 0; col < columns; col += 2 * kTile) {
        const bool two_rows = rows - r > kTile, two_columns = columns - col > kTile;
        auto* run = two_rows ? two_columns ? multiply_tiles<true, true> : multiply_tiles<true, false>
                    : two_columns ? multiply_tiles<false, true>
                                : multiply_tiles<false, false>;
        run(depth, left, a_stride, b + col, b_stride, to + col, c_stride, add);
      }
    }
  }

  // Columns of a block as pairs of neighbours, [whole(size)][kPairs].
  struct Columns {
    Columns(int64_t given, Scratch& scratch)
        : size(given),
          width(whole(size)),
          columns(scratch.take(width * kPairs)),
          by_key(scratch.take(kPairs * width)) {}

    void load(const Problem& p, const Tokens& tokens, const Segment& segment, int64_t kv_head,
              int64_t key, int64_t count) const {
      pair_block_rows(p, tokens, segment, kv_head, key, count, size, by_key);
      transpose(by_key, width, kPairs, width, columns, kPairs);
    }

    void multiply(const Range& range, int64_t panel_columns, const float* right, float* sums,
                  bool add) const {
      Tiles::multiply(width, panel_columns, range.count() / 2, columns + range.first / 2, kPairs,
                      right, kCols, sums, kCols, add);
    }

    int64_t size, width;
    float *columns, *by_key;
  };
};

// Rows of all panels lie side by side, so that sums over queries go through memory but once in a
// block.
struct TilePairs : PairedBackward<Tiles> {
  static constexpr int64_t kMostPairs = kBackwardPanels * kPanelPairs;

  TilePairs(const Problem& p, Scratch& scratch)
      : PairedBackward(p, scratch),
        queries(scratch.take(kMostPairs * sum_lines)),
        out_grads(scratch.take(kMostPairs * out_lines)),
        rounded_scores(scratch.take(kBlock * kMostPairs)),
        rounded_grads(scratch.take(kBlock * kMostPairs)) {}

  void take_rows(int64_t panel, BackwardState& state, Scratch&) const {
    if (queries == nullptr) return;  // memory is only counted
    state.queries = queries + panel * kPanelPairs * sum_lines;
    state.grads = out_grads + panel * kPanelPairs * out_lines;
  }

  void begin(int64_t panels) {
    count = panels;
    stride = count * kPanelPairs;
  }

  void begin_block() {
    first = count;
    last = 0;
  }

  void skip(int64_t panel) const { clear(panel, 0, kBlock); }

  void add(int64_t i, const Range& range, const Panel& panel, int64_t, const float* scores,
           const float* grads, const KeySums&, const BackwardState& state) {
    first = least(first, i);
    last = i + 1;
    clear(i, 0, range.first);
    clear(i, range.last, kBlock);
    const int64_t place = range.first * stride + i * kPanelPairs;
    round_by_columns(scores, range.count(), rounded_scores + place, stride);
    round_by_columns(grads, range.count(), rounded_grads + place, stride);
    add_queries(range, panel, grads, state);
  }

  void end_block(int64_t key, const KeySums& sums) const {
    if (first >= last) return;
    const int64_t pairs = (last - first) * kPanelPairs, place = first * kPanelPairs;
    Tiles::multiply(kBlock, out_lines, pairs, rounded_scores + place, stride,
                    out_grads + place * out_lines, out_lines, sums.v + key * sums.v_width,
                    sums.v_width, true);
    Tiles::multiply(kBlock, sum_lines, pairs, rounded_grads + place, stride,
                    queries + place * sum_lines, sum_lines, sums.k + key * sums.k_width,
                    sums.k_width, true);
  }

  float *queries, *out_grads, *rounded_scores, *rounded_grads;
  int64_t count = 0, stride = 0;  // panels of the part, and pairs of their rows
  int64_t first = 0, last = 0;    // the panels that see some of the block

 private:
  // Keys [begin, end) of the block, which a panel does not see.
  void clear(int64_t panel, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      zero(rounded_scores + i * stride + panel * kPanelPairs, kPanelPairs);
      zero(rounded_grads + i * stride + panel * kPanelPairs, kPanelPairs);
    }
  }
};

}  // namespace

// The rest is AVX-512's, or where tiles are emulated without it, that of every machine.
const Table& make_table() {
  static const Table table = [] {
    Table made = JAXTAP_BASE::make_table();
    set_forward_of<PairedForward<Tiles>>(made.bf16);
    set_backward_of<TilePairs>(made.bf16);
    return made;
  }();
  return table;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
