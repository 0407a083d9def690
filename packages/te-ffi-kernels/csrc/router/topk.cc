#include "router/topk.h"

#include <algorithm>

#include "common/arena.h"

namespace jaxtap::router {
namespace {

constexpr int64_t kSerialBelow = 1 << 12;  // numbers that one thread is as fast for

struct Ranked {
  int32_t key, at;
};

bool is_before(const Ranked& one, const Ranked& other) {
  return one.key > other.key || (one.key == other.key && one.at < other.at);
}

struct Row {};

// Integers in the order of the numbers.
int32_t key_of(const void* keys, te::Float dtype, int64_t at) {
  if (dtype == te::Float::kF32) {
    const int32_t bits = static_cast<const int32_t*>(keys)[at];
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }
  const int32_t bits = static_cast<const int16_t*>(keys)[at];
  return bits ^ ((bits >> 31) & 0x7fff);
}

void copy(const TopK& args, int64_t from, int64_t to) {
  if (args.dtype == te::Float::kF32) {
    static_cast<float*>(args.values)[to] = static_cast<const float*>(args.keys)[from];
  } else {
    static_cast<uint16_t*>(args.values)[to] = static_cast<const uint16_t*>(args.keys)[from];
  }
}

void of_row(const TopK& args, int64_t row) {
  auto* best = Arena<Row>::get_array<Ranked>(args.cols);
  const int64_t begin = row * args.cols;
  if (args.k * 16 <= args.cols) {
    // Few of many: most are behind the last of the best so far, a heap whose first it is.
    int64_t count = 0;
    for (int64_t i = 0; i < args.cols; ++i) {
      const Ranked one = {key_of(args.keys, args.dtype, begin + i), static_cast<int32_t>(i)};
      if (count == args.k) {
        if (!is_before(one, best[0])) continue;
        std::pop_heap(best, best + count--, is_before);
      }
      best[count++] = one;
      std::push_heap(best, best + count, is_before);
    }
    std::sort_heap(best, best + count, is_before);
  } else {
    for (int64_t i = 0; i < args.cols; ++i) {
      best[i] = {key_of(args.keys, args.dtype, begin + i), static_cast<int32_t>(i)};
    }
    std::partial_sort(best, best + args.k, best + args.cols, is_before);
  }
  for (int64_t i = 0; i < args.k; ++i) {
    copy(args, begin + best[i].at, row * args.k + i);
    args.indices[row * args.k + i] = best[i].at;
  }
}

}  // namespace

void topk(const TopK& args, const Parallel& parallel) {
  if (args.k == 0) return;
  parallel.ranges(args.rows, std::max<int64_t>(1, kSerialBelow / args.cols),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) of_row(args, row);
                  });
}

}  // namespace jaxtap::router
