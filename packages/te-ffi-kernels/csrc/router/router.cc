#include "router/router.h"

#include <algorithm>
#include <cstring>

#include "common/arena.h"
#include "common/convert.h"
#include "common/isa_table.h"
#include "common/parallel.h"
#include "router/table.h"

namespace jaxtap::router {
namespace {

constexpr int64_t kSerialBelow = 1 << 13;  // numbers that aren't worth a second thread
constexpr int64_t kChunk = 128;    // rows that are added in float32, before double takes over

struct Memory {};
struct Expanded {};
struct Sums {};
struct Parts {};

template <typename Body>
void for_tokens(int64_t tokens, int64_t experts, const Parallel& pool, const Body& body) {
  const Parallel parallel = tokens * experts <= kSerialBelow ? Parallel() : pool;
  const int64_t grain = std::max<int64_t>(1, kSerialBelow / 2 / std::max<int64_t>(1, experts));
  parallel.ranges(tokens, grain, body);
}

// A byte for each expert, of a bit for each.
void expand(const uint8_t* bits, int64_t experts, uint8_t* bytes) {
  for (int64_t i = 0; i < experts; ++i) bytes[i] = bits[i / 8] >> (i % 8) & 1;
}

}  // namespace

void forward(const Forward& args, const Parallel& parallel) {
  const int64_t experts = args.options.experts;
  const auto run = table().forward[static_cast<int>(args.dtype)];
  for_tokens(args.tokens, experts, parallel, [&](int64_t begin, int64_t end) {
    float* memory = Arena<Memory>::get_array<float>(Scratch::floats(experts));
    const Scratch scratch(memory, experts);
    for (int64_t token = begin; token < end; ++token) run(args, token, scratch);
  });
}

void backward(const Backward& args, const Parallel& parallel) {
  const Options& options = args.options;
  const int64_t experts = options.experts, bytes = te::bytes_of(args.dtype);
  const auto run = table().backward[static_cast<int>(args.dtype)][static_cast<int>(options.score)];
  for_tokens(args.tokens, experts, parallel, [&](int64_t begin, int64_t end) {
    const bool bits = options.format == MapFormat::kBits;
    uint8_t* expanded = bits ? Arena<Expanded>::get_array<uint8_t>(experts) : nullptr;
    for (int64_t token = begin; token < end; ++token) {
      const uint8_t* map = nullptr;
      if (!options.dense) {
        map = args.map + token * map_bytes(options.format, experts);
        if (bits) {
          expand(map, experts, expanded);
          map = expanded;
        }
      }
      const int64_t at = token * experts;
      run(options, map, args.saved + at, static_cast<const char*>(args.grad) + at * bytes,
          static_cast<char*>(args.out) + at * bytes);
    }
  });
}

float loss(const Loss& args, const void* probs, const float* tokens_per_expert,
           const Parallel& parallel) {
  const int64_t experts = args.experts, row = experts * te::bytes_of(args.dtype);
  const int64_t chunks = (args.tokens + kChunk - 1) / kChunk;
  const auto add_rows = table().add_rows[static_cast<int>(args.dtype)];
  // One for each chunk, whatever thread adds it: the sum doesn't depend on how many there are.
  double* parts = Arena<Parts>::get_array<double>(chunks);
  for_tokens(chunks, experts * kChunk, parallel, [&](int64_t begin, int64_t end) {
    float* sums = Arena<Sums>::get_array<float>(experts);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * kChunk;
      std::memset(sums, 0, static_cast<size_t>(experts) * sizeof(float));
      add_rows(static_cast<const char*>(probs) + first * row,
               std::min(kChunk, args.tokens - first), experts, sums);
      double part = 0;
      for (int64_t i = 0; i < experts; ++i) {
        part += static_cast<double>(sums[i]) * static_cast<double>(tokens_per_expert[i]);
      }
      parts[chunk] = part;
    }
  });
  double sum = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += parts[chunk];
  return static_cast<float>(sum * static_cast<double>(args.coefficient));
}

void loss_gradient(const Loss& args, const float* tokens_per_expert, float grad, void* out,
                   const Parallel& parallel) {
  const int64_t bytes = args.experts * te::bytes_of(args.dtype);
  char* row = Arena<Memory>::get_array<char>(bytes);
  for (int64_t i = 0; i < args.experts; ++i) {
    const float slope = args.coefficient * tokens_per_expert[i] * grad;
    if (args.dtype == te::Float::kF32) {
      std::memcpy(row + 4 * i, &slope, 4);
      continue;
    }
    const uint16_t half =
        args.dtype == te::Float::kBF16 ? f32_to_bf16(slope) : f32_to_f16(slope);
    std::memcpy(row + 2 * i, &half, 2);
  }
  for_tokens(args.tokens, args.experts, parallel, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      std::memcpy(static_cast<char*>(out) + token * bytes, row, static_cast<size_t>(bytes));
    }
  });
}

}  // namespace jaxtap::router

JAXTAP_DEFINE_TABLE(router)
