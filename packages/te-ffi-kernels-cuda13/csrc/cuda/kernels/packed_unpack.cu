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

__global__ void packed_factors_kernel(Args args) {
  const Panels& weight = args.weight;
  const int64_t at = thread_number();
  if (at >= weight.count * kCols) return;
  const int64_t panel = at / kCols;
  const float* scales = scales_of(weight.data + panel * weight.bytes) + at % kCols;
  float factor = *scales;
  if (weight.group != 0) {
    // The power of two that's at most the largest scale, within those that have a reciprocal.
    uint32_t most = 0;
    for (int64_t g = 0; g < weight.k / weight.group; ++g) {
      const uint32_t bits = float_bits(scales[g * kCols]) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    constexpr uint32_t kInfinity = 0x7f800000u, kLargest = 253u << 23;
    const uint32_t power = most & kInfinity;
    factor = power == 0 || power == kInfinity ? 1.0f
                                              : bits_float(power > kLargest ? kLargest : power);
  }
  if (!fits(weight, panel)) factor = std::numeric_limits<float>::quiet_NaN();
  args.factors[at] = factor;
}

// The panel, and the run of a column in it.
struct Place {
  int64_t panel, run;
  int col;
};

JAXTAP_DEVICE Place place_of(const Args& args) {
  const int64_t at = thread_number();
  return {at / kCols / args.runs, at / kCols % args.runs, static_cast<int>(at % kCols)};
}

JAXTAP_DEVICE uint32_t word_of(const Panels& weight, const Place& place, int64_t line) {
  const uint8_t* codes = weight.data + place.panel * weight.bytes + weight.codes_offset;
  return reinterpret_cast<const uint32_t*>(codes + line * kLine)[place.col];
}

__global__ void packed_codes_kernel(Args args) {
  const Panels& weight = args.weight;
  const Place place = place_of(args);
  if (place.panel >= weight.count) return;
  Vector<uint32_t, kLinesAsCodes> out;
  JAXTAP_UNROLL
  for (int i = 0; i < kLinesAsCodes; ++i) {
    out.at[i] = word_of(weight, place, place.run * kLinesAsCodes + i) ^ 0x80808080u;
  }
  const int64_t at = ((place.panel * kCols + place.col) * args.runs + place.run) * kLinesAsCodes;
  write<kLinesAsCodes>(static_cast<uint32_t*>(args.out) + at, out);
}

template <class X, int kBits>
__global__ void packed_numbers_kernel(Args args) {
  const Panels& weight = args.weight;
  const Place place = place_of(args);
  if (place.panel >= weight.count) return;
  const int64_t from = place.run * kRun;
  float numbers[kRun];
  JAXTAP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint32_t word = word_of(weight, place, kBits == 8 ? 2 * place.run + half : place.run);
    JAXTAP_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t byte = word >> (8 * j) & 0xffu;
      numbers[4 * half + j] = number<kBits>(kBits == 8 ? byte : byte >> (4 * half) & 0xfu);
    }
  }
  const int64_t column = place.panel * kCols + place.col;
  auto* out = static_cast<typename X::Type*>(args.out) + column * weight.k + from;
  if (weight.group != 0) {
    const float* scales = scales_of(weight.data + place.panel * weight.bytes);
    const float scale = scales[from / weight.group * kCols + place.col] / args.factors[column];
    JAXTAP_UNROLL
    for (int i = 0; i < kRun; ++i) numbers[i] *= scale;
    if constexpr (sizeof(typename X::Type) == 2) {
      float rest[kRun];
      JAXTAP_UNROLL
      for (int i = 0; i < kRun; ++i) rest[i] = numbers[i] - X::load(X::store(numbers[i]));
      store<X>(out + weight.count * kCols * weight.k, weight.k - from, args.wide, rest);
    }
  }
  store<X>(out, weight.k - from, args.wide, numbers);
}

template <class X>
void run(Args args, Stream stream) {
  args.runs = ceil_of(args.weight.k, kRun);
  args.wide = args.weight.k % kRun == 0;
  const int64_t blocks = ceil_of(args.weight.count * kCols * args.runs, kThreads);
  if (args.weight.bits == 8) {
    launch(packed_numbers_kernel<X, 8>, blocks, kThreads, stream, args);
  } else {
    launch(packed_numbers_kernel<X, 4>, blocks, kThreads, stream, args);
  }
}

}  // namespace

void packed_unpack(const PackedWeight& given, Stream stream) {
  Args args = {};
  args.weight = panels_of(given.weight, given.k, given.n, given.group, given.bits);
  args.out = given.out;
  args.factors = given.factors;
  const int64_t cols = args.weight.count * kCols;
  launch(packed_factors_kernel, ceil_of(cols, kThreads), kThreads, stream, args);
  if (given.as_codes) {
    args.runs = args.weight.lines / kLinesAsCodes;
    return launch(packed_codes_kernel, ceil_of(cols * args.runs, kThreads), kThreads, stream, args);
  }
  switch (given.dtype) {
    case te::Float::kF32: return run<F32>(args, stream);
    case te::Float::kBF16: return run<BF16>(args, stream);
    case te::Float::kF16: return run<F16>(args, stream);
  }
}

}  // namespace jaxtap::cuda
