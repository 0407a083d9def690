#include "permutation/permutation.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/arena.h"

namespace jaxtap::permutation {
namespace {

constexpr int64_t kSerialBelow = 1 << 14;  // bytes that one thread is as fast for
constexpr int64_t kWide = 2048;    // numbers of a row at once

int64_t rows_in(int64_t bytes) {
  return std::max<int64_t>(1, kSerialBelow / std::max<int64_t>(1, bytes));
}

// Whose a row is.
struct Owner {
  int64_t token = -1, expert = 0;
};

std::vector<Owner> owners(const RowMap& map) {
  std::vector<Owner> found(static_cast<size_t>(map.rows));
  for (int64_t token = 0; token < map.tokens; ++token) {
    map.each(token, [&](int64_t row, int64_t expert) {
      found[static_cast<size_t>(row)] = {token, expert};
    });
  }
  return found;
}

const char* at(const void* array, int64_t bytes) { return static_cast<const char*>(array) + bytes; }
char* at(void* array, int64_t bytes) { return static_cast<char*>(array) + bytes; }

struct Sums {};
struct Numbers {};

// Of rows up to kWide, in parts that the compiler makes vectors of.
float dot(const float* a, const float* b, int64_t count) {
  constexpr int64_t kParts = 16;
  float parts[kParts] = {};
  int64_t i = 0;
  for (; i + kParts <= count; i += kParts) {
    for (int64_t j = 0; j < kParts; ++j) parts[j] += a[i + j] * b[i + j];
  }
  for (int64_t j = 0; i + j < count; ++j) parts[j] += a[i + j] * b[i + j];
  float sum = 0.0f;
  for (float part : parts) sum += part;
  return sum;
}

}  // namespace

void make_row_map(const MakeRowMap& args, const Parallel& parallel) {
  const int64_t experts = args.experts, width = 2 * experts + 1;
  const int64_t chunk = std::max<int64_t>(64, args.tokens / (4 * parallel.threads()) + 1);
  const int64_t chunks = (args.tokens + chunk - 1) / chunk;
  // Where each chunk's rows of each expert begin; first, how many these are.
  std::vector<int32_t> starts(static_cast<size_t>(chunks * experts), 0);
  const auto over = [&](int64_t index, auto&& body) {
    for (int64_t t = index * chunk; t < std::min(args.tokens, (index + 1) * chunk); ++t) body(t);
  };
  parallel.run(chunks, [&](int64_t index) {
    int32_t* counts = starts.data() + index * experts;
    over(index, [&](int64_t token) {
      const uint8_t* routed = args.routed + token * experts;
      for (int64_t e = 0; e < experts; ++e) counts[e] += routed[e] != 0;
    });
  });
  int32_t row = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int32_t first = row;
    for (int64_t i = 0; i < chunks; ++i) {
      int32_t& start = starts[static_cast<size_t>(i * experts + e)];
      const int32_t count = start;
      start = row;
      row += count;
    }
    args.counts[e] = row - first;
  }
  parallel.run(chunks, [&](int64_t index) {
    int32_t* next = starts.data() + index * experts;
    over(index, [&](int64_t token) {
      const uint8_t* routed = args.routed + token * experts;
      int32_t* mine = args.entries + token * width;
      std::fill_n(mine, width, -1);
      int32_t count = 0;
      for (int64_t e = 0; e < experts; ++e) {
        if (routed[e] == 0) continue;
        mine[count] = next[e]++;
        mine[experts + count++] = static_cast<int32_t>(e);
      }
      mine[2 * experts] = count;
    });
  });
}

void permute(const Permute& args, const Parallel& parallel) {
  const RowMap& map = args.map;
  const std::vector<Owner> of = owners(map);
  const auto bytes = static_cast<size_t>(args.row_bytes);
  const auto prob_bytes = static_cast<size_t>(args.prob_bytes);
  parallel.ranges(map.rows, rows_in(args.row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto [token, expert] = of[static_cast<size_t>(row)];
      char* to = at(args.out, row * args.row_bytes);
      if (token < 0) {
        std::memset(to, 0, bytes);
      } else {
        std::memcpy(to, at(args.x, token * args.row_bytes), bytes);
      }
      if (args.probs == nullptr) continue;
      char* prob = at(args.permuted_probs, row * args.prob_bytes);
      if (token < 0) {
        std::memset(prob, 0, prob_bytes);
      } else {
        std::memcpy(prob, at(args.probs, (token * map.experts + expert) * args.prob_bytes),
                    prob_bytes);
      }
    }
  });
}

void unpermute(const Unpermute& args, const Parallel& parallel) {
  const RowMap& map = args.map;
  const te::Table& table = te::table();
  const int dtype = static_cast<int>(args.dtype);
  const int64_t bytes = te::bytes_of(args.dtype);
  parallel.ranges(map.tokens, rows_in(args.cols * bytes), [&](int64_t begin, int64_t end) {
    float* sums = Arena<Sums>::get_array<float>(kWide);
    float* numbers = Arena<Numbers>::get_array<float>(kWide);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t col = 0; col < args.cols; col += kWide) {
        const int64_t count = std::min(kWide, args.cols - col);
        std::fill_n(sums, count, 0.0f);
        map.each(token, [&](int64_t row, int64_t expert) {
          table.load[dtype](at(args.x, (row * args.cols + col) * bytes), numbers, count);
          if (args.factors != nullptr) {
            table.multiply(numbers, count, args.factors[token * map.experts + expert]);
          }
          table.add(numbers, sums, count);
        });
        table.store[dtype](sums, at(args.out, (token * args.cols + col) * bytes), count);
      }
      if (args.permuted_probs == nullptr) continue;
      char* probs = at(args.probs, token * map.experts * args.prob_bytes);
      std::memset(probs, 0, static_cast<size_t>(map.experts * args.prob_bytes));
      map.each(token, [&](int64_t row, int64_t expert) {
        std::memcpy(probs + expert * args.prob_bytes,
                    at(args.permuted_probs, row * args.prob_bytes),
                    static_cast<size_t>(args.prob_bytes));
      });
    }
  });
}

void unpermute_gradient(const UnpermuteGradient& args, const Parallel& parallel) {
  const RowMap& map = args.map;
  const te::Table& table = te::table();
  const int dtype = static_cast<int>(args.dtype);
  const int64_t bytes = te::bytes_of(args.dtype);
  const std::vector<Owner> of = owners(map);
  std::fill_n(args.factors_grad, map.tokens * map.experts, 0.0f);
  parallel.ranges(map.rows, rows_in(args.cols * bytes), [&](int64_t begin, int64_t end) {
    float* grad = Arena<Sums>::get_array<float>(kWide);
    float* numbers = Arena<Numbers>::get_array<float>(kWide);
    for (int64_t row = begin; row < end; ++row) {
      const auto [token, expert] = of[static_cast<size_t>(row)];
      char* out = at(args.x_grad, row * args.cols * bytes);
      if (token < 0) {
        std::memset(out, 0, static_cast<size_t>(args.cols * bytes));
        continue;
      }
      const int64_t place = token * map.experts + expert;
      float sum = 0.0f;
      for (int64_t col = 0; col < args.cols; col += kWide) {
        const int64_t count = std::min(kWide, args.cols - col);
        table.load[dtype](at(args.grad, (token * args.cols + col) * bytes), grad, count);
        table.load[dtype](at(args.x, (row * args.cols + col) * bytes), numbers, count);
        sum += dot(grad, numbers, count);
        table.multiply(grad, count, args.factors[place]);
        table.store[dtype](grad, out + col * bytes, count);
      }
      args.factors_grad[place] = sum;
    }
  });
}

}  // namespace jaxtap::permutation
