#include "training/quantize_int8.h"

#include <algorithm>
#include <limits>

#include "common/arena.h"
#include "common/convert.h"
#include "common/isa_table.h"

namespace jaxtap::training {
namespace {

constexpr int64_t kSerialBelow = 1 << 14;   // numbers that aren't worth a second thread
constexpr int64_t kPart = 1 << 14;  // numbers that a thread takes at a time
constexpr float kLargestDivisor = 0x1p126f;

struct Magnitudes {};
struct Inverses {};

float scale_of(int32_t most) {
  if (most > 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  // As XLA divides by a constant.
  return std::max(bits_float(static_cast<uint32_t>(most)) * (1.0f / 127.0f),
                  std::numeric_limits<float>::min());
}

// As XLA divides by what is broadcast. Infinities over an infinite scale would be NaN, and the
// inverse must not be subnormal. A NaN stays.
float inverse_of(float scale) {
  return 1.0f / (scale > kLargestDivisor ? kLargestDivisor : scale);
}

class Quantizer {
 public:
  explicit Quantizer(const Args& args)
      : args_(args),
        table_(table()),
        dtype_(static_cast<int>(args.dtype)),
        bytes_(te::bytes_of(args.dtype)) {}

  // Rows of all blocks, by row.
  void rows(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      Line line = line_of(row);
      const float scale = scale_of(table_.absmax[dtype_](at(row, 0), args_.columns, line));
      args_.scales[row] = scale;
      line.inverse = inverse_of(scale);
      quantize(row, line);
    }
  }

  void column_absmax(int64_t begin, int64_t end, int32_t* most) const {
    for (int64_t row = begin; row < end; ++row) {
      table_.absmax_each[dtype_](at(row, 0), args_.columns, line_of(row), most);
    }
  }

  void columns(int64_t begin, int64_t end, const float* inverses) const {
    for (int64_t row = begin; row < end; ++row) {
      Line line = line_of(row);
      line.inverses = inverses;
      quantize(row, line);
    }
  }

 private:
  const void* at(int64_t row, int64_t column) const {
    return static_cast<const char*>(args_.x) + (row * args_.columns + column) * bytes_;
  }

  Line line_of(int64_t row) const {
    Line line;
    if (args_.factors != nullptr && args_.by_row) {
      line.factors = args_.factors + row / args_.rows * args_.columns;
    } else if (args_.factors != nullptr) {
      line.factor = args_.factors[row];
    }
    if (args_.noise == Noise::kGiven) line.noise_of_all = args_.given[row];
    return line;
  }

  void quantize(int64_t row, const Line& line) const {
    int8_t* out = args_.out + row * args_.columns;
    if (args_.keys == nullptr) {
      return table_.quantize[dtype_](at(row, 0), args_.columns, line, out);
    }
    const int64_t rows = args_.blocks * args_.rows;  // of a group
    const uint32_t* key = args_.keys + row / rows * 2;
    const int64_t first = row % rows * args_.columns;
    float noise[kDrawn];
    for (int64_t i = 0; i < args_.columns; i += kDrawn) {
      const int64_t count = std::min(kDrawn, args_.columns - i);
      table_.draw(args_.noise, key, static_cast<uint32_t>(first + i), count, noise);
      Line part = line;
      part.noise = noise;
      if (line.factors != nullptr) part.factors += i;
      if (line.inverses != nullptr) part.inverses += i;
      table_.quantize[dtype_](at(row, i), count, part, out + i);
    }
  }

  const Args& args_;
  const Table& table_;
  const int dtype_;
  const int64_t bytes_;
};

}  // namespace

void quantize_int8(const Args& args, const Parallel& pool) {
  const int64_t blocks = args.groups * args.blocks, rows = blocks * args.rows;
  const Parallel parallel = rows * args.columns <= kSerialBelow ? Parallel() : pool;
  const Quantizer quantizer(args);
  const int64_t grain = kPart / std::max<int64_t>(1, args.columns);
  if (args.by_row) {
    parallel.ranges(rows, grain, [&](int64_t begin, int64_t end) { quantizer.rows(begin, end); });
    return;
  }
  // Blocks are cut into parts, whose magnitudes come first. They are few: those of all parts are put
  // together by one thread.
  const int64_t evenly = divide_up(args.rows, 4 * parallel.threads());
  const int64_t size = std::max<int64_t>(1, std::min(std::max(grain, evenly), args.rows));
  const int64_t parts = std::max<int64_t>(1, (args.rows + size - 1) / size);
  auto* most = Arena<Magnitudes>::get_array<int32_t>(blocks * parts * args.columns);
  const auto of_part = [&](int64_t i, const auto& body) {
    const int64_t begin = i % parts * size, first = i / parts * args.rows;
    body(first + begin, first + std::min(args.rows, begin + size));
  };
  const int64_t few = kPart / std::max<int64_t>(1, size * args.columns);
  parallel.ranges(blocks * parts, few, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      int32_t* found = most + i * args.columns;
      std::fill_n(found, args.columns, 0);
      of_part(i, [&](int64_t begin, int64_t end) { quantizer.column_absmax(begin, end, found); });
    }
  });
  float* inverses = Arena<Inverses>::get_array<float>(blocks * args.columns);
  for (int64_t block = 0; block < blocks; ++block) {
    int32_t* found = most + block * parts * args.columns;
    for (int64_t part = 1; part < parts; ++part) {
      for (int64_t c = 0; c < args.columns; ++c) {
        found[c] = std::max(found[c], found[part * args.columns + c]);
      }
    }
    for (int64_t c = 0; c < args.columns; ++c) {
      const float scale = scale_of(found[c]);
      args.scales[block * args.columns + c] = scale;
      inverses[block * args.columns + c] = inverse_of(scale);
    }
  }
  // What was read last comes first: it may be in the caches still, and what was read first isn't.
  const int64_t all = blocks * parts;
  parallel.ranges(all, few, [&](int64_t first, int64_t last) {
    for (int64_t i = all - 1 - first; i > all - 1 - last; --i) {
      of_part(i, [&](int64_t begin, int64_t end) {
        quantizer.columns(begin, end, inverses + i / parts * args.columns);
      });
    }
  });
}

}  // namespace jaxtap::training

JAXTAP_DEFINE_TABLE(training)
