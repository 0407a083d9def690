// A panel: the queries that lie side by side in the columns of a block of scores; and what is done
// to such blocks alike in forward and in backward. Of one instruction set.
#pragma once

#include "attention/isa/lanes.h"
// After it, which says how multiply-adds are compiled.
#include "attention/table.h"
#include "common/philox.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

static_assert(kBlock % kWidth == 0 && kBlock % 4 == 0, "blocks have whole registers");
constexpr int64_t kForwardRows = 1024;  // of a part
constexpr int64_t kBackwardRows = 512;

// Hands out scratch memory, of which there may be none: then it only counts.
class Scratch {
 public:
  explicit Scratch(float* data) : data_(data) {}
  float* take(int64_t count) {
    float* const found = data_ == nullptr ? nullptr : data_ + taken_;
    taken_ += (count + 15) / 16 * 16;
    return found;
  }
  int64_t taken() const { return taken_; }

 private:
  float* data_;
  int64_t taken_ = 0;
};

inline void zero(float* to, int64_t count) {
  std::memset(to, 0, static_cast<size_t>(count) * sizeof(float));
}

struct Panel {
  int64_t begin, rows;   // of the part's rows
  int64_t columns;       // rows rounded up to registers
  int32_t first_low, last_low, first_high, last_high;
  alignas(64) int32_t low[kCols], high[kCols];  // the keys that each column sees, both inclusive

  // Whether all columns see all keys of [key, key + count).
  bool sees_all(int64_t key, int64_t count) const {
    return key >= last_low && key + count - 1 <= first_high;
  }
};

// Where a part's rows are. `group` consecutive rows are heads from `head` on of one query.
struct Rows {
  int64_t head, group;

  int64_t query(int64_t row) const { return row / group; }
  int64_t head_of(int64_t row) const { return head + row % group; }
  int64_t token(const Segment& segment, int64_t row) const {
    return segment.q_start + query(row);
  }
};

inline int64_t index_of(const Tokens& tokens, int64_t token, int64_t head) {
  return token * tokens.token_stride + head * tokens.head_stride;
}

inline float* aux_of(const Problem& p, const Segment& segment, const Rows& rows, int64_t row) {
  return p.aux + segment.aux_start + rows.query(row) * p.aux_token_stride +
         rows.head_of(row) * p.aux_head_stride;
}

inline void set_panel(const Problem& p, const Segment& segment, const Rows& rows, int64_t begin,
                      int64_t end, Panel& panel) {
  panel.begin = begin;
  panel.rows = least(kCols, end - begin);
  panel.columns = padded(panel.rows);
  const int64_t shift = p.bottom_right ? segment.kv_length - segment.q_length : 0;
  for (int64_t c = 0; c < kCols; ++c) {
    const int64_t diagonal = rows.query(begin + least(c, panel.rows - 1)) + shift;
    int64_t low = 0, high = segment.kv_length - 1;
    if (p.left >= 0) low = most(low, diagonal - p.left);
    if (p.right >= 0) high = least(high, diagonal + p.right);
    panel.low[c] = static_cast<int32_t>(least(low, segment.kv_length));
    panel.high[c] = static_cast<int32_t>(most(high, -1));
  }
  // Both only grow from column to column.
  panel.first_low = panel.low[0];
  panel.last_low = panel.low[kCols - 1];
  panel.first_high = panel.high[0];
  panel.last_high = panel.high[kCols - 1];
}

// The panels of [begin, end); returns their number. What multiplies keys in steps of more than one
// computes all columns.
template <int64_t kStep>
inline int64_t set_panels(const Problem& p, const Segment& segment, const Rows& rows, int64_t begin,
                          int64_t end, Panel* panels) {
  int64_t count = 0;
  for (int64_t row = begin; row < end; row += kCols) {
    Panel& panel = panels[count++];
    set_panel(p, segment, rows, row, end, panel);
    if (kStep > 1) panel.columns = kCols;
  }
  return count;
}

// A row of a panel or of a block.
inline const char* row_of(const Problem& p, const Tokens& tokens, const Segment& segment,
                          const Rows& rows, int64_t row) {
  const int64_t index = index_of(tokens, rows.token(segment, row), rows.head_of(row));
  return at(static_cast<const void*>(tokens.data), p.dtype, index);
}

inline const char* row_of(const Problem& p, const Tokens& tokens, const Segment& segment,
                          int64_t kv_head, int64_t key) {
  const int64_t index = index_of(tokens, segment.kv_start + key, kv_head);
  return at(static_cast<const void*>(tokens.data), p.dtype, index);
}

// Rows of a panel as [kCols][width] in float32; rows and numbers that there aren't are 0.
inline void load_panel(const Problem& p, const Tokens& tokens, const Segment& segment,
                       const Rows& rows, const Panel& panel, int64_t size, float* to,
                       int64_t width) {
  for (int64_t r = 0; r < panel.rows; ++r) {
    const int64_t row = panel.begin + r;
    const int64_t index = index_of(tokens, rows.token(segment, row), rows.head_of(row));
    load_numbers(p.dtype, at(tokens.data, p.dtype, index), size, to + r * width, width);
  }
  zero(to + panel.rows * width, (kCols - panel.rows) * width);
}

// Keys or values [key, key + count) as [count][width].
inline void load_block(const Problem& p, const Tokens& tokens, const Segment& segment,
                       int64_t kv_head, int64_t key, int64_t count, int64_t size, float* to,
                       int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = index_of(tokens, segment.kv_start + key + i, kv_head);
    load_numbers(p.dtype, at(tokens.data, p.dtype, index), size, to + i * width, width);
  }
}

// Asks for a share of what load_block will read. The rows of a head are far from each other, which
// processors don't foresee.
inline void prefetch_block(const Problem& p, const Tokens& tokens, const Segment& segment,
                           int64_t kv_head, int64_t key, int64_t share, int64_t shares,
                           int64_t size) {
  const int64_t count = least(kBlock, segment.kv_length - key);
  const int64_t bytes = size * (p.dtype == DType::F32 ? 4 : 2);
  for (int64_t i = count * share / shares; i < count * (share + 1) / shares; ++i) {
    const int64_t index = index_of(tokens, segment.kv_start + key + i, kv_head);
    const char* row = at(tokens.data, p.dtype, index);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
}

// Asks for the rows of a panel, to be read (kWrite 0) or written (1).
template <int kWrite>
inline void prefetch_panel(const Problem& p, const Tokens& tokens, const Segment& segment,
                           const Rows& rows, const Panel& panel, int64_t size) {
  const int64_t bytes = size * (p.dtype == DType::F32 ? 4 : 2);
  for (int64_t r = 0; r < panel.rows; ++r) {
    const char* row = row_of(p, tokens, segment, rows, panel.begin + r);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, kWrite, 2);
  }
}

// Asks for a share of what a part reads first.
inline void prefetch_part(const Problem& p, const Part& part, int64_t share, int64_t shares) {
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  Panel panel;
  const int64_t count = least(part.end - part.begin, 2 * kBlock);
  panel.begin = part.begin + count * share / shares;
  panel.rows = part.begin + count * (share + 1) / shares - panel.begin;
  prefetch_panel<0>(p, p.q, part.segment, rows, panel, p.qk_size);
  prefetch_block(p, p.k, part.segment, part.kv_head, 0, share, shares, p.qk_size);
  prefetch_block(p, p.v, part.segment, part.kv_head, 0, share, shares, p.v_size);
}

// The keys of a block that a panel sees, or some more: [first, last) within it.
struct Range {
  int64_t first, last;
  int64_t count() const { return last - first; }
};

// As many more as make steps; those that there aren't are masked.
template <int64_t kStep>
inline Range seen(const Panel& panel, int64_t key, int64_t count) {
  // Four keys share the random words of dropout.
  const Range range = {most(0, panel.first_low - key) / 4 * 4,
                       least(count, panel.last_high + 1 - key)};
  if (kStep == 1 || range.count() <= 0) return range;
  return {range.first / kStep * kStep, (range.last + kStep - 1) / kStep * kStep};
}

// Whether queries are scaled, and not their scores: the order of these would not be that of the
// scaled ones.
inline bool scales_queries(const Problem& p) {
  return p.bias_type == Bias::kNone && !(p.scale > 0);
}

// scores[count][kCols] of the bias of keys from `key` on: (pre-scale: (scores + bias) * scale;
// post-scale: scores * scale + bias).
inline void add_bias(const Problem& p, const Segment& segment, const Rows& rows, const Panel& panel,
                     int64_t key, int64_t count, float* scores, float* by_query, float* by_key) {
  const int64_t batch = p.bias_batches == 1 ? 0 : segment.batch;
  const int64_t width = padded(count);
  for (int64_t r = 0; r < panel.rows; ++r) {
    const int64_t row = panel.begin + r;
    const int64_t head = p.bias_heads == 1 ? 0 : rows.head_of(row);
    const int64_t line = (batch * p.bias_heads + head) * p.most_queries + rows.query(row);
    load_numbers(p.dtype, at(p.bias, p.dtype, line * p.most_keys + key), count,
                 by_query + r * kBlock, width);
  }
  for (int64_t r = panel.rows; r < panel.columns; ++r) {
    zero(by_query + r * kBlock, width);
  }
  transpose(by_query, kBlock, panel.columns, width, by_key, kCols);
  const float before = p.bias_type == Bias::kPreScale ? p.scale : 1.0f;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < panel.columns; c += kWidth) {
      float* score = scores + i * kCols + c;
      write(score, read(score) * p.scale + read(by_key + i * kCols + c) * before);
    }
  }
}

// Scores that a column doesn't see become -inf.
inline void mask(const Panel& panel, int64_t key, int64_t count, float* scores) {
  for (int64_t c = 0; c < panel.columns; c += kWidth) {
    const Ints low = read(panel.low + c), high = read(panel.high + c);
    for (int64_t i = 0; i < count; ++i) {
      const Ints now = all(static_cast<int32_t>(key + i));
      const Vector score = read(scores + i * kCols + c);
      const Vector cut = now < low ? all(-kInfinity) : score;
      write(scores + i * kCols + c, now > high ? all(-kInfinity) : cut);
    }
  }
}

// The factors of dropout, 0 or 1, of keys from `key` (a multiple of 4) on, as [count][kCols].
inline void draw(const Problem& p, const Segment& segment, const Rows& rows, const Panel& panel,
                 int64_t key, int64_t count, float* factors) {
  const double scaled = static_cast<double>(p.dropout) * 4294967296.0;
  const uint32_t threshold = scaled >= 4294967295.0 ? 0xffffffffu : static_cast<uint32_t>(scaled);
  alignas(64) uint32_t query[kCols], head[kCols], words[4][kCols];
  for (int64_t c = 0; c < kCols; ++c) {
    const int64_t row = panel.begin + least(c, panel.rows - 1);
    query[c] = static_cast<uint32_t>(rows.query(row));
    head[c] = static_cast<uint32_t>(segment.number * p.q_heads + rows.head_of(row));
  }
  for (int64_t i = 0; i < count; i += 4) {
    const auto quad = static_cast<uint32_t>((key + i) / 4);
    for (int64_t c = 0; c < kCols; ++c) {
      uint32_t c0 = quad, c1 = query[c], c2 = head[c], c3 = p.offset;
      philox(c0, c1, c2, c3, p.seed[0], p.seed[1]);
      words[0][c] = c0;
      words[1][c] = c1;
      words[2][c] = c2;
      words[3][c] = c3;
    }
    for (int64_t w = 0; w < least(4, count - i); ++w) {
      for (int64_t c = 0; c < kCols; ++c) {
        factors[(i + w) * kCols + c] = words[w][c] >= threshold ? 1.0f : 0.0f;
      }
    }
  }
}

inline float keep_scale(const Problem& p) { return p.dropout > 0 ? 1.0f / (1.0f - p.dropout) : 1.0f; }

// Columns [size][kCols] times a factor each, as the rows of a panel.
inline void store_panel(const Problem& p, const Tokens& tokens, const Segment& segment,
                        const Rows& rows, const Panel& panel, int64_t size, float* columns,
                        const float* factors, float* by_query) {
  const int64_t width = padded(size);
  for (int64_t c = 0; c < panel.columns; c += kWidth) {
    const Vector factor = read(factors + c);
    for (int64_t i = 0; i < size; ++i) {
      write(columns + i * kCols + c, read(columns + i * kCols + c) * factor);
    }
  }
  transpose(columns, kCols, width, panel.columns, by_query, width);
  for (int64_t r = 0; r < panel.rows; ++r) {
    const int64_t row = panel.begin + r;
    const int64_t index = index_of(tokens, rows.token(segment, row), rows.head_of(row));
    store_numbers(p.dtype, by_query + r * width, size, at(tokens.data, p.dtype, index));
  }
}

// Keys [kBlock][qk_width] and values [kBlock][v_width] of a block in float32: what ways to multiply
// that convert to float32 have in common.
struct FloatBlock {
  struct Scope {};
  static constexpr int64_t kStep = 1;

  FloatBlock(const Problem& p, Scratch& scratch)
      : qk(p.qk_size),
        v(p.v_size),
        qk_width(padded(qk)),
        v_width(padded(v)),
        keys(scratch.take(kBlock * qk_width)),
        values(scratch.take(kBlock * v_width)) {}

  void load(const Problem& p, const Segment& segment, int64_t kv_head, int64_t key,
            int64_t count) const {
    load_block(p, p.k, segment, kv_head, key, count, qk, keys, qk_width);
    load_block(p, p.v, segment, kv_head, key, count, v, values, v_width);
  }

  int64_t qk, v, qk_width, v_width;
  float *keys, *values;
};

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
