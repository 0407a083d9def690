#include "fakequant/fake_quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/arena.h"
#include "common/isa_table.h"

namespace jaxtap::fakequant {
namespace {

struct Scratch {};

constexpr int64_t kSerialBelow = 1 << 14;   // numbers that aren't worth a second thread
constexpr int64_t kPart = 1 << 13;  // numbers that a thread takes at a time

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// NaN where one of them is.
float lesser(float a, float b) { return a != a || a < b ? a : b; }
float greater(float a, float b) { return a != a || a > b ? a : b; }

// The mean of the ranges of all indices.
Extremes own_range(const Args& args, const Parallel& parallel) {
  const auto run = table().extremes[static_cast<int>(args.dtype)];
  const int64_t size = te::bytes_of(args.dtype);
  const int64_t parts = std::max<int64_t>(1, (args.numbers + kPart - 1) / kPart);
  Extremes* found = Arena<Scratch>::get_array<Extremes>(args.indices * parts);
  const int64_t grain = std::max<int64_t>(1, kPart / std::max<int64_t>(1, args.numbers));
  parallel.ranges(args.indices * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % parts * kPart;
      const int64_t at = i / parts * args.numbers + first;
      found[i] = run(static_cast<const char*>(args.x) + at * size,
                     std::min(kPart, args.numbers - first));
    }
  });
  const auto share = static_cast<float>(1.0 / static_cast<double>(args.indices));
  Extremes mean = {0.0f, 0.0f};
  for (int64_t i = 0; i < args.indices; ++i) {
    Extremes one = found[i * parts];
    for (int64_t part = 1; part < parts; ++part) {
      one.lower = lesser(one.lower, found[i * parts + part].lower);
      one.upper = greater(one.upper, found[i * parts + part].upper);
    }
    if (args.options.symmetric) {
      one.upper = greater(-one.lower, one.upper);
      one.lower = -one.upper;
    }
    mean.lower += one.lower * share;
    mean.upper += one.upper * share;
  }
  return mean;
}

// The bounds that are added to the sums; not finite where none is.
void added_bounds(const Args& args, const Parallel& parallel, float* bounds) {
  const Options& options = args.options;
  if (options.observe) {
    const Extremes own = own_range(args, parallel);
    const bool join = options.join;
    bounds[0] = join ? lesser(args.seen[0], own.lower) : own.lower;
    bounds[1] = join ? greater(args.seen[1], own.upper) : own.upper;
    return;
  }
  bool needs_own = false;
  for (int i = 0; i < 2; ++i) {
    bounds[i] = args.seen != nullptr && std::isfinite(args.seen[i]) ? args.seen[i] : kNan;
    needs_own = needs_own || (bounds[i] != bounds[i] && args.terms->count[i] == 0);
  }
  if (!needs_own) return;
  const Extremes own = own_range(args, parallel);
  const float ends[2] = {own.lower, own.upper};
  for (int i = 0; i < 2; ++i) {
    if (bounds[i] != bounds[i] && args.terms->count[i] == 0) bounds[i] = ends[i];
  }
}

Grid grid_of(const float* bounds, const Options& options) {
  constexpr float kTiny = std::numeric_limits<float>::min();
  const float high = static_cast<float>((int64_t{1} << (options.bits - 1)) - 1);
  Grid grid;
  if (options.symmetric) {
    grid.scale = greater(bounds[1] * (1.0f / high), kTiny);
    grid.least = -high;
    grid.most = high;
  } else {
    const float low = -high - 1.0f, step = 1.0f / (high - low);
    // The difference itself could overflow.
    grid.scale = greater(std::fma(bounds[1], step, -(bounds[0] * step)), kTiny);
    const float point = std::nearbyint(low - bounds[0] / grid.scale);
    const float zero = greater(low, lesser(point, high));
    grid.least = low - zero;
    grid.most = high - zero;
  }
  grid.reciprocal = 1.0f / grid.scale;
  return grid;
}

}  // namespace

void fake_quantize(const Args& args, const Parallel& pool) {
  const int64_t total = args.indices * args.numbers;
  const Parallel parallel = total <= kSerialBelow ? Parallel() : pool;
  float added[2];
  added_bounds(args, parallel, added);
  const Terms terms = *args.terms;
  for (int i = 0; i < 2; ++i) {
    if (args.options.observe) args.observed[i] = added[i];
    const bool wanted = std::isfinite(added[i]);
    const float sum =
        wanted ? std::fma(args.options.share, added[i], terms.sum[i]) : terms.sum_before[i];
    args.bounds[i] = sum / (wanted ? terms.weight[i] : terms.weight_before[i]);
  }
  const Grid grid = grid_of(args.bounds, args.options);
  const auto run = table().round[static_cast<int>(args.dtype)];
  const int64_t size = te::bytes_of(args.dtype);
  const Extremes bounds = {args.bounds[0], args.bounds[1]};
  const int64_t groups = (args.rows + 7) / 8, width = kPart / std::clamp<int64_t>(args.rows, 1, 8);
  const int64_t parts = (args.columns + width - 1) / width;
  const int64_t grain = total == 0 ? 1 : args.blocks * groups * parts * kPart / total;
  parallel.ranges(args.blocks * groups * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / parts, row = group % groups * 8, column = i % parts * width;
      const int64_t at = (group / groups * args.rows + row) * args.columns + column;
      const Rows rows = {std::min<int64_t>(args.rows - row, 8),
                         std::min(args.columns - column, width), args.columns};
      run(static_cast<const char*>(args.x) + at * size, static_cast<char*>(args.out) + at * size,
          args.inside + group * args.columns + column, rows, grid, bounds);
    }
  });
}

}  // namespace jaxtap::fakequant

JAXTAP_DEFINE_TABLE(fakequant)
