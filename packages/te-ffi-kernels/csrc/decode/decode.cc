#include "decode/decode.h"

#include <algorithm>
#include <vector>

#include "common/arena.h"
#include "common/error.h"
#include "common/isa_table.h"
#include "decode/table.h"

namespace jaxtap::decode {
namespace {

struct PartialsTag {};
struct ScratchTag {};

// Positions of a task. Fixed, so that sums are added in the same order whatever the threads.
constexpr int64_t kStretch = 512;
// Numbers of keys that are not worth a second thread: some 10 microseconds.
constexpr int64_t kSerialBelow = 1 << 17;

int format_of(DType dtype) {
  switch (dtype) {
    case DType::F32: return 0;
    case DType::BF16: return 1;
    case DType::F16: return 2;
    case DType::S8: return 3;
    default: throw invalid_argument("attention over a cache: no kernel takes ", name(dtype));
  }
}

int64_t bytes_of(DType dtype) { return static_cast<int64_t>(byte_size(dtype)); }

// What one sequence sees: query i the positions from `first(i)` to before `last(i)`.
struct Sight {
  const Attention& args;
  int64_t length;

  int64_t end(int64_t query) const { return args.causal ? length - args.queries + 1 + query : length; }
  int64_t last(int64_t query) const { return std::clamp<int64_t>(end(query), 0, args.positions); }
  int64_t first(int64_t query) const {
    if (args.window == 0) return 0;
    return std::clamp<int64_t>(end(query) - args.window, 0, args.positions);
  }
};

class Heads {
 public:
  explicit Heads(const Attention& args) : args_(args), table_(table()) {
    rows_ = args.queries * args.group;
    stretches_ = std::max<int64_t>(1, (args.positions + kStretch - 1) / kStretch);
    width_ = padded(args.size);
  }

  void run(const Parallel& pool) {
    const int64_t heads = args_.batch * args_.kv_heads;
    // A row more takes a third of the time that the first takes.
    const bool few = seen() * args_.kv_heads * args_.size * (2 + rows_) <= 3 * kSerialBelow;
    const Parallel serial;
    const Parallel& parallel = few ? serial : pool;
    const int64_t parts = heads * stretches_ * rows_;
    partials_.most = Arena<PartialsTag>::get_array<float>(parts * (2 + width_));
    partials_.sums = partials_.most + parts;
    partials_.totals = partials_.sums + parts;
    parallel.run(heads * stretches_,
                 [&](int64_t i) { attend(i / stretches_, i % stretches_); });
    parallel.ranges(heads, std::max<int64_t>(1, kSerialBelow / (rows_ * width_)),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t head = begin; head < end; ++head) finish(head);
                    });
  }

 private:
  // The place of a query's head in q and in the result.
  int64_t place(int64_t head, int64_t row) const {
    const int64_t batch = head / args_.kv_heads, kv_head = head % args_.kv_heads;
    const int64_t query = row / args_.group;
    const int64_t before = (batch * args_.queries + query) * args_.kv_heads + kv_head;
    return (before * args_.group + row % args_.group) * args_.size;
  }

  // Positions of all sequences.
  int64_t seen() const {
    int64_t count = 0;
    for (int64_t b = 0; b < args_.batch; ++b) {
      const Sight sight{args_, args_.lengths[b]};
      count += sight.last(args_.queries - 1) - sight.first(0);
    }
    return count;
  }

  Sight sight(int64_t head) const {
    return {args_, args_.lengths[head / args_.kv_heads]};
  }

  Partial partial(int64_t head, int64_t stretch) const {
    const int64_t at = (head * stretches_ + stretch) * rows_;
    return {partials_.most + at, partials_.sums + at, partials_.totals + at * width_};
  }

  void attend(int64_t head, int64_t stretch) const {
    const Sight seen = sight(head);
    const int64_t row_floats = rows_ * width_;
    float* memory = Arena<ScratchTag>::get_array<float>(row_floats + scratch_of(rows_));
    std::vector<int64_t> first(rows_), last(rows_);
    std::vector<const uint8_t*> masks(args_.mask == nullptr ? 0 : rows_);
    const int64_t batch = head / args_.kv_heads;
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t query = r / args_.group;
      first[r] = seen.first(query);
      last[r] = seen.last(query);
      if (args_.mask != nullptr) {
        const int64_t of_batch = args_.mask_batch == 1 ? 0 : batch;
        const int64_t of_query = args_.mask_queries == 1 ? 0 : query;
        masks[r] =
            args_.mask + (of_batch * args_.mask_queries + of_query) * args_.positions;
      }
    }
    Stretch s;
    s.begin = std::max(stretch * kStretch, seen.first(0));
    s.end = std::min((stretch + 1) * kStretch, seen.last(args_.queries - 1));
    if (s.begin < s.end) {
      const auto* q = static_cast<const uint8_t*>(args_.q);
      for (int64_t r = 0; r < rows_; ++r) {
        table_.scaled[format_of(args_.q_dtype)](q + place(head, r) * bytes_of(args_.q_dtype),
                                                args_.scale, args_.size, memory + r * width_);
      }
    }
    // In rows of keys.
    const int64_t before = args_.heads_first
                               ? head * args_.positions
                               : batch * args_.positions * args_.kv_heads + head % args_.kv_heads;
    const int64_t bytes = before * args_.size * bytes_of(args_.cache_dtype);
    s.q = memory;
    s.rows = rows_;
    s.size = args_.size;
    s.keys = static_cast<const uint8_t*>(args_.keys) + bytes;
    s.values = static_cast<const uint8_t*>(args_.values) + bytes;
    s.key_scales = args_.key_scales == nullptr ? nullptr : args_.key_scales + before;
    s.value_scales = args_.value_scales == nullptr ? nullptr : args_.value_scales + before;
    s.first = first.data();
    s.last = last.data();
    s.masks = args_.mask == nullptr ? nullptr : masks.data();
    s.step = args_.heads_first ? 1 : args_.kv_heads;
    s.softcap = args_.softcap;
    s.scratch = memory + row_floats;
    s.out = partial(head, stretch);
    table_.attend[format_of(args_.cache_dtype)](s);
  }

  void finish(int64_t head) const {
    const Partial first = partial(head, 0);
    auto* out = static_cast<uint8_t*>(args_.out);
    for (int64_t r = 0; r < rows_; ++r) {
      table_.finish[format_of(args_.out_dtype)](
          {first.most + r, first.sums + r, first.totals + r * width_}, stretches_, rows_,
          args_.size, out + place(head, r) * bytes_of(args_.out_dtype));
    }
  }

  const Attention& args_;
  const Table& table_;
  int64_t rows_, stretches_, width_;
  Partial partials_{};
};

}  // namespace

void attend(const Attention& args, const Parallel& parallel) {
  if (args.batch * args.queries * args.kv_heads * args.group * args.size == 0) return;
  Heads(args).run(parallel);
}

}  // namespace jaxtap::decode

JAXTAP_DEFINE_TABLE(decode)
