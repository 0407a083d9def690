#include "softmax/softmax.h"

#include <algorithm>
#include <cstring>

#include "common/arena.h"
#include "common/isa_table.h"
#include "common/parallel.h"
#include "softmax/table.h"

namespace jaxtap::softmax {
namespace {

struct Scratch {};

constexpr int64_t kSerialBelow = 1 << 14;  // numbers that aren't worth a second thread

// Calls body(row, columns) for each row and the number of columns that it has; the rest of the
// result's row are zeros.
template <typename Body>
void for_rows(const Shape& shape, void* out, const Parallel& pool, const Body& body) {
  const Parallel parallel = shape.rows() * shape.k <= kSerialBelow ? Parallel() : pool;
  const int64_t grain = std::max<int64_t>(1, kSerialBelow / 2 / std::max<int64_t>(1, shape.k));
  const int64_t bytes = te::bytes_of(shape.dtype);
  if (shape.k == 0) return;
  parallel.ranges(shape.rows(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t columns = shape.causal ? std::min(row % shape.q + 1, shape.k) : shape.k;
      body(row, columns);
      std::memset(static_cast<char*>(out) + (row * shape.k + columns) * bytes, 0,
                  static_cast<size_t>((shape.k - columns) * bytes));
    }
  });
}

}  // namespace

void forward(const Forward& args, const Parallel& parallel) {
  const Shape& shape = args.shape;
  const auto run = table().forward[static_cast<int>(shape.dtype)][args.mask != nullptr];
  const int64_t bytes = te::bytes_of(shape.dtype);
  for_rows(shape, args.out, parallel, [&](int64_t row, int64_t columns) {
    const int64_t at = row * shape.k * bytes;
    const uint8_t* mask = args.mask;
    if (mask != nullptr) {
      const int64_t batch = row / (shape.heads * shape.q);
      mask += (batch % args.masks * shape.q + row % shape.q) * shape.k;
    }
    float* scratch = shape.dtype == te::Float::kF32
                         ? nullptr
                         : Arena<Scratch>::get_array<float>(padded(shape.k));
    run(static_cast<const char*>(args.x) + at, mask, static_cast<char*>(args.out) + at, scratch,
        columns, args.scale);
  });
}

void backward(const Backward& args, const Parallel& parallel) {
  const auto run = table().backward[static_cast<int>(args.shape.dtype)];
  const int64_t bytes = te::bytes_of(args.shape.dtype);
  for_rows(args.shape, args.out, parallel, [&](int64_t row, int64_t columns) {
    const int64_t at = row * args.shape.k * bytes;
    run(static_cast<const char*>(args.grad) + at, static_cast<const char*>(args.softmax) + at,
        static_cast<char*>(args.out) + at, columns, args.scale);
  });
}

}  // namespace jaxtap::softmax

JAXTAP_DEFINE_TABLE(softmax)
