#include <algorithm>

#include "common/arena.h"
#include "norms/norms.h"
#include "norms/table.h"
#include "norms/weights.h"
#include "te/table.h"

namespace jaxtap::norms {
namespace {

constexpr int64_t kSerialBelow = 1 << 14;   // numbers that one thread is as fast for
constexpr int64_t kChunks = 16;
constexpr int64_t kRows = 4;
constexpr int64_t kWide = 512;

struct Gamma {};
struct Sums {};
struct Numbers {};
struct Results {};

// A range of rows, by one thread.
class Task {
 public:
  Task(const Gradient& args, const float* gamma, float* dgamma, float* dbeta)
      : args_(args),
        gamma_(gamma),
        dgamma_(dgamma),
        dbeta_(dbeta) {}

  void run(int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += kRows) some(row, std::min(kRows, end - row));
  }

 private:
  const float* numbers(const void* from, int64_t row, int64_t rows, float* to) const {
    const char* at = static_cast<const char*>(from) + row * args_.cols * bytes_;
    if (args_.dtype == te::Float::kF32) return reinterpret_cast<const float*>(at);
    te_.load[static_cast<int>(args_.dtype)](at, to, rows * args_.cols);
    return to;
  }

  void some(int64_t row, int64_t rows) {
    const int64_t cols = args_.cols;
    const bool floats = args_.dtype == te::Float::kF32;
    float* memory = floats ? nullptr : Arena<Numbers>::get_array<float>(2 * kRows * cols);
    float means[kRows], first[kRows], second[kRows];
    Part part;
    part.dz = numbers(args_.dz, row, rows, memory);
    part.x = numbers(args_.x, row, rows, floats ? nullptr : memory + kRows * cols);
    part.stride = cols;
    part.mean = means;
    part.rsigma = args_.rsigma + row;
    part.first = first;
    part.second = second;
    part.rows = rows;
    for (int64_t i = 0; i < rows; ++i) {
      means[i] = args_.kind == Kind::kRms ? 0.0f : args_.mean[row + i];
      norms_.means(part.dz + i * cols, part.x + i * cols, cols, means[i], part.rsigma[i], gamma_,
                   first + i, second + i);
    }
    float* results = Arena<Results>::get_array<float>(kRows * kWide);
    for (int64_t col = 0; col < cols; col += kWide) {
      Part tile = part;
      tile.dz += col;
      tile.x += col;
      tile.gamma = gamma_ + col;
      tile.cols = std::min(kWide, cols - col);
      norms_.backward(tile, results, kWide, dgamma_ + col,
                      dbeta_ == nullptr ? nullptr : dbeta_ + col);
      for (int64_t i = 0; i < rows; ++i) {
        char* to = static_cast<char*>(args_.dx) + ((row + i) * cols + col) * bytes_;
        te_.store[static_cast<int>(args_.dtype)](results + i * kWide, to, tile.cols);
      }
    }
  }

  const Gradient& args_;
  const int64_t bytes_ = te::bytes_of(args_.dtype);
  const Table& norms_ = norms::table();
  const te::Table& te_ = te::table();
  const float* gamma_;
  float *dgamma_, *dbeta_;
};

}  // namespace

void backward(const Gradient& args, const Parallel& pool) {
  const te::Table& table = te::table();
  const Parallel parallel = args.rows * args.cols <= kSerialBelow ? Parallel() : pool;
  const float* gamma = weights<Gamma>(args.gamma, args.weights, args.cols, args.zero_centered);
  const int64_t kinds = args.kind == Kind::kRms ? 1 : 2;
  const int64_t chunk =
      std::max<int64_t>(1, ((args.rows + kChunks - 1) / kChunks + kRows - 1) / kRows * kRows);
  const int64_t chunks = std::max<int64_t>(1, (args.rows + chunk - 1) / chunk);
  float* sums = Arena<Sums>::get_array<float>(chunks * kinds * args.cols);
  std::fill_n(sums, chunks * kinds * args.cols, 0.0f);
  parallel.run(chunks, [&](int64_t i) {
    float* dgamma = sums + i * kinds * args.cols;
    Task(args, gamma, dgamma, kinds == 2 ? dgamma + args.cols : nullptr)
        .run(i * chunk, std::min(args.rows, (i + 1) * chunk));
  });
  for (int64_t i = 1; i < chunks; ++i) {
    table.add(sums + i * kinds * args.cols, sums, kinds * args.cols);
  }
  const auto store = table.store[static_cast<int>(args.weights)];
  store(sums, args.dgamma, args.cols);
  if (kinds == 2) store(sums + args.cols, args.dbeta, args.cols);
}

}  // namespace jaxtap::norms
