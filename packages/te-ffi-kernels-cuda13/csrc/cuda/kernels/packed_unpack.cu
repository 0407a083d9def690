// A thread has some codes of a column that follow each other; columns of a panel are side by side.
#include <limits>

#include "cuda/kernels/packed.h"
#include "cuda/kernels/panels.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLinesAsCodes = 4;  // 16 codes, which are 16 bytes
constexpr int kRun = 8;           // numbers of a thread

struct Args {
  Panels weight;
  void* out;
  float* factors;
  int64_t runs;  // of a column
  bool wide;     // columns may be written in vectors
};

template <int kBits>
__global__ void packed_factors_kernel(Args args) {
  const Panels& weight = args.weight;
  const int64_t at = thread_number();
  if (at >= weight.count * kColsOf<kBits>) return;
  const int64_t index = at / kColsOf<kBits>;
  const int col = static_cast<int>(at % kColsOf<kBits>);
  const uint8_t* panel = weight.data + index * weight.bytes;
  float factor;
  if (weight.group == 0) {
    factor = scale_of<kBits>(weight, panel, 0, col);
  } else {
    // The power of two that's at most the largest scale, within those that have a reciprocal.
    uint32_t most = 0;
    for (int64_t g = 0; g < weight.groups; ++g) {
      const uint32_t bits = float_bits(scale_of<kBits>(weight, panel, g, col)) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    constexpr uint32_t kInfinity = 0x7f800000u, kLargest = 253u << 23;
    const uint32_t power = most & kInfinity;
    factor = power == 0 || power == kInfinity ? 1.0f
                                              : bits_float(power > kLargest ? kLargest : power);
  }
  if (!fits(weight, index)) factor = std::numeric_limits<float>::quiet_NaN();
  args.factors[at] = factor;
}

// The panel, and the run of a column in it.
struct Place {
  int64_t panel, run;
  int col;
};

template <int kBits>
JAXTAP_DEVICE Place place_of(const Args& args) {
  const int64_t at = thread_number(), line = at / kColsOf<kBits>;
  return {line / args.runs, line % args.runs, static_cast<int>(at % kColsOf<kBits>)};
}

template <int kBits>
JAXTAP_DEVICE uint32_t word_of(const Panels& weight, const Place& place, int64_t line) {
  const int64_t group = kBits == 8 || weight.group == 0 ? 0 : line / weight.group_lines;
  const uint8_t* panel = weight.data + place.panel * weight.bytes;
  const uint8_t* codes = line_of<kBits>(weight, panel, group, line);
  return reinterpret_cast<const uint32_t*>(codes)[place.col];
}

__global__ void packed_codes_kernel(Args args) {
  constexpr int kBits = 8;
  const Panels& weight = args.weight;
  const Place place = place_of<kBits>(args);
  if (place.panel >= weight.count) return;
  Vector<uint32_t, kLinesAsCodes> out;
  JAXTAP_UNROLL
  for (int i = 0; i < kLinesAsCodes; ++i) {
    out.at[i] = word_of<kBits>(weight, place, place.run * kLinesAsCodes + i) ^ 0x80808080u;
  }
  const int64_t column = place.panel * kColsOf<kBits> + place.col;
  write<kLinesAsCodes>(
      static_cast<uint32_t*>(args.out) + (column * args.runs + place.run) * kLinesAsCodes, out);
}

template <class X, int kBits>
__global__ void packed_numbers_kernel(Args args) {
  const Panels& weight = args.weight;
  const Place place = place_of<kBits>(args);
  if (place.panel >= weight.count) return;
  const int64_t from = place.run * kRun;
  float numbers[kRun];
  JAXTAP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint32_t word =
        word_of<kBits>(weight, place, kBits == 8 ? 2 * place.run + half : place.run);
    JAXTAP_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t byte = word >> (8 * j) & 0xffu;
      numbers[4 * half + j] = number<kBits>(kBits == 8 ? byte : byte >> (4 * half) & 0xfu);
    }
  }
  const int64_t column = place.panel * kColsOf<kBits> + place.col;
  auto* out = static_cast<typename X::Type*>(args.out) + column * weight.k + from;
  if (weight.group != 0) {
    const uint8_t* panel = weight.data + place.panel * weight.bytes;
    const float scale = scale_of<kBits>(weight, panel, from / weight.group, place.col) /
                        args.factors[column];
    JAXTAP_UNROLL
    for (int i = 0; i < kRun; ++i) numbers[i] *= scale;
    if constexpr (sizeof(typename X::Type) == 2) {
      float rest[kRun];
      JAXTAP_UNROLL
      for (int i = 0; i < kRun; ++i) rest[i] = numbers[i] - X::load(X::store(numbers[i]));
      store<X>(out + weight.count * kColsOf<kBits> * weight.k, weight.k - from, args.wide, rest);
    }
  }
  store<X>(out, weight.k - from, args.wide, numbers);
}

template <class X, int kBits>
void run_numbers(Args args, Stream stream) {
  args.runs = ceil_of(args.weight.k, kRun);
  args.wide = args.weight.k % kRun == 0;
  const int64_t blocks = ceil_of(args.weight.count * kColsOf<kBits> * args.runs, kThreads);
  launch(packed_numbers_kernel<X, kBits>, blocks, kThreads, stream, args);
}

template <int kBits>
void run(const PackedWeight& given, Args args, Stream stream) {
  const int64_t cols = args.weight.count * kColsOf<kBits>;
  launch(packed_factors_kernel<kBits>, ceil_of(cols, kThreads), kThreads, stream, args);
  if (given.as_codes) {
    args.runs = args.weight.lines / kLinesAsCodes;
    return launch(packed_codes_kernel, ceil_of(cols * args.runs, kThreads), kThreads, stream, args);
  }
  switch (given.dtype) {
    case te::Float::kF32: return run_numbers<F32, kBits>(args, stream);
    case te::Float::kBF16: return run_numbers<BF16, kBits>(args, stream);
    case te::Float::kF16: return run_numbers<F16, kBits>(args, stream);
  }
}

}  // namespace

void packed_unpack(const PackedWeight& given, Stream stream) {
  Args args = {};
  args.weight = panels_of(given.weight, given.layout, given.n);
  args.out = given.out;
  args.factors = given.factors;
  return given.layout.bits == 8 ? run<8>(given, args, stream) : run<4>(given, args, stream);
}

}  // namespace jaxtap::cuda
