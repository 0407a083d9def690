#include "attention/attention.h"

#include <algorithm>
#include <cstring>

#include "attention/table.h"
#include "common/arena.h"
#include "common/isa.h"
#include "common/isa_table.h"
#include "common/parallel.h"

namespace jaxtap::attention {
namespace {

struct Blocks {};
struct Sums {};
struct PieceSums {};
struct SinkSums {};

constexpr int64_t kWidth = 16;        // widths of sums are multiples of it
constexpr double kSerialBelow = 1 << 18;     // multiply-adds that one thread is as fast for
constexpr int64_t kTasks = 8;         // of forward, for each thread
constexpr int64_t kWantedTasks = 16;  // of backward, whatever the number of threads

int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_small(const Problem& p) {
  return static_cast<double>(p.segments * p.q_heads) * static_cast<double>(p.most_queries) *
             static_cast<double>(p.most_keys) * static_cast<double>(p.qk_size + p.v_size) <=
         kSerialBelow;
}

// Backward's work on one head of keys, cut into pieces of rows where heads alone are too few.
class Backward {
 public:
  Backward(const Problem& p, const Gradients& gradients, const Table& table)
      : p_(p), gradients_(gradients), table_(table) {
    heads_ = p.segments * p.kv_heads;
    const int64_t parts = ceil_of(p.most_queries * p.group(), table_.backward_rows);
    const int64_t wanted = std::min(ceil_of(kWantedTasks, std::max<int64_t>(heads_, 1)), parts);
    piece_rows_ = ceil_of(std::max<int64_t>(parts, 1), std::max<int64_t>(wanted, 1)) *
                  table_.backward_rows;
    pieces_ = std::max<int64_t>(1, ceil_of(p.most_queries * p.group(), piece_rows_));
    k_width_ = ceil_of(p.qk_size, kWidth) * kWidth;
    v_width_ = ceil_of(p.v_size, kWidth) * kWidth;
    keys_ = ceil_of(p.most_keys, kBlock) * kBlock;
    size_ = std::max<int64_t>(1, keys_ * (k_width_ + v_width_));
  }

  void run(const Parallel& parallel) {
    const int64_t sinks = std::max<int64_t>(1, heads_ * pieces_ * p_.group());
    if (gradients_.sink_grad != nullptr) {
      sinks_ = Arena<SinkSums>::get_array<float>(sinks);
      std::memset(sinks_, 0, static_cast<size_t>(sinks) * sizeof(float));
    }
    if (pieces_ > 1) shared_ = Arena<PieceSums>::get_array<float>(heads_ * pieces_ * size_);
    parallel.run(heads_ * pieces_, [&](int64_t task) {
      // The last rows first: with a causal mask they are the most work.
      piece(task % heads_, pieces_ - 1 - task / heads_);
    });
    if (pieces_ > 1) {
      const int64_t lines = 128, blocks = ceil_of(p_.most_keys, lines);
      parallel.run(heads_ * blocks, [&](int64_t task) {
        const Segment segment = segment_of(task / blocks);
        const int64_t begin = task % blocks * lines;
        const int64_t end = std::min(begin + lines, segment.kv_length);
        for (int64_t i = 1; i < pieces_ && begin < end; ++i) {
          table_.add(k_sums(task / blocks, i) + begin * k_width_,
                     k_sums(task / blocks, 0) + begin * k_width_, (end - begin) * k_width_);
          table_.add(v_sums(task / blocks, i) + begin * v_width_,
                     v_sums(task / blocks, 0) + begin * v_width_, (end - begin) * v_width_);
        }
        store(task / blocks, begin, end, k_sums(task / blocks, 0), v_sums(task / blocks, 0));
      });
    }
    if (gradients_.sink_grad != nullptr) add_sinks();
  }

 private:
  Segment segment_of(int64_t head) const { return p_.segment(p_.context, head / p_.kv_heads); }
  float* k_sums(int64_t head, int64_t piece) const {
    return shared_ + (head * pieces_ + piece) * size_;
  }
  float* v_sums(int64_t head, int64_t piece) const {
    return k_sums(head, piece) + keys_ * k_width_;
  }

  void piece(int64_t head, int64_t index) {
    Part part;
    part.segment = segment_of(head);
    part.kv_head = head % p_.kv_heads;
    const int64_t keys = part.segment.kv_length;
    KeySums sums;
    sums.k = pieces_ > 1 ? k_sums(head, index) : Arena<Sums>::get_array<float>(size_);
    sums.v = sums.k + keys_ * k_width_;
    sums.k_width = k_width_;
    sums.v_width = v_width_;
    if (sinks_ != nullptr) sums.sink = sinks_ + (head * pieces_ + index) * p_.group();
    const int64_t whole = ceil_of(keys, kBlock) * kBlock;
    std::memset(sums.k, 0, static_cast<size_t>(whole * k_width_) * sizeof(float));
    std::memset(sums.v, 0, static_cast<size_t>(whole * v_width_) * sizeof(float));
    const bool bf16 = p_.dtype == DType::BF16 && table_.bf16.backward != nullptr;
    const Method& method = bf16 ? table_.bf16 : table_.any;
    float* scratch = Arena<Blocks>::get_array<float>(method.backward_scratch(p_));
    const int64_t begin = index * piece_rows_;
    const int64_t end = std::min(begin + piece_rows_, part.segment.q_length * p_.group());
    for (part.begin = begin; part.begin < end; part.begin += table_.backward_rows) {
      part.end = std::min<int64_t>(part.begin + table_.backward_rows, end);
      method.backward(p_, gradients_, part, sums, scratch);
    }
    if (pieces_ == 1) store(head, 0, keys, sums.k, sums.v);
  }

  // Keys [begin, end) of a head.
  void store(int64_t head, int64_t begin, int64_t end, const float* k, const float* v) const {
    if (begin >= end) return;
    const int64_t token = segment_of(head).kv_start + begin;
    table_.store(p_, gradients_.k_grad, head % p_.kv_heads, token, end - begin, p_.qk_size,
                 k + begin * k_width_, k_width_, p_.scale);
    table_.store(p_, gradients_.v_grad, head % p_.kv_heads, token, end - begin, p_.v_size,
                 v + begin * v_width_, v_width_, 1.0f);
  }

  void add_sinks() const {
    const int64_t group = p_.group();
    for (int64_t head = 0; head < p_.q_heads; ++head) {
      float sum = 0;
      for (int64_t segment = 0; segment < p_.segments; ++segment) {
        const int64_t of_keys = segment * p_.kv_heads + head / group;
        for (int64_t i = 0; i < pieces_; ++i) {
          sum += sinks_[(of_keys * pieces_ + i) * group + head % group];
        }
      }
      gradients_.sink_grad[head] = sum;
    }
  }

  const Problem& p_;
  const Gradients& gradients_;
  const Table& table_;
  int64_t heads_, piece_rows_, pieces_, k_width_, v_width_, keys_, size_;
  float* shared_ = nullptr;
  float* sinks_ = nullptr;
};

}  // namespace

void forward(const Problem& p, const Parallel& pool, Isa isa) {
  const Table& table = attention::table(isa);
  const Parallel serial;
  const Parallel& parallel = is_small(p) ? serial : pool;
  const int64_t heads = p.segments * p.kv_heads, rows = p.most_queries * p.group();
  const int64_t wanted = kTasks * parallel.threads();
  int64_t step = table.forward_rows;
  while (step > 2 * table.columns && heads * ceil_of(rows, step) < wanted) step /= 2;
  const int64_t steps = ceil_of(rows, step), parts = heads * steps;
  const bool bf16 = p.dtype == DType::BF16 && p.scale > 0 && table.bf16.forward != nullptr;
  const Method& method = bf16 ? table.bf16 : table.any;
  const auto part_of = [&](int64_t i) {
    Part part;
    part.segment = p.segment(p.context, i % heads / p.kv_heads);
    part.kv_head = i % heads % p.kv_heads;
    // The last rows first: with a causal mask they are the most work.
    part.begin = (steps - 1 - i / heads) * step;
    part.end = std::min(part.begin + step, part.segment.q_length * p.group());
    return part;
  };
  // Short parts one after the other, since each asks for what the next one reads.
  const int64_t some = std::max<int64_t>(1, parts / std::max<int64_t>(1, wanted));
  parallel.run(ceil_of(parts, some), [&](int64_t task) {
    float* scratch = Arena<Blocks>::get_array<float>(method.forward_scratch(p));
    const int64_t end = std::min(parts, (task + 1) * some);
    Part part = part_of(task * some), next;
    for (int64_t i = task * some; i < end; ++i, part = next) {
      if (i + 1 < end) next = part_of(i + 1);
      part.next = i + 1 < end && next.begin < next.end ? &next : nullptr;
      if (part.begin < part.end) method.forward(p, part, scratch);
    }
  });
}

void backward(const Problem& p, const Gradients& gradients, const Parallel& pool, Isa isa) {
  const Table& table = attention::table(isa);
  const Parallel serial;
  const Parallel& parallel = is_small(p) ? serial : pool;
  Backward(p, gradients, table).run(parallel);
  if (gradients.bias_grad == nullptr) return;
  const int64_t panels = ceil_of(p.most_queries, table.columns);
  parallel.run(p.bias_batches * p.bias_heads * panels, [&](int64_t task) {
    const int64_t line = task / panels;
    table.bias_grad(p, gradients, line / p.bias_heads, line % p.bias_heads,
                    task % panels * table.columns,
                    Arena<Blocks>::get_array<float>(table.bias_grad_scratch(p)));
  });
}

}  // namespace jaxtap::attention

JAXTAP_DEFINE_TABLES(attention, amx, neon)
