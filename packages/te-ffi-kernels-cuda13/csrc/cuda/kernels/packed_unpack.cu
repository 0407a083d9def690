// A thread has 16 values of a column that follow each other; columns of a panel are side by side.
#include <limits>

#include "cuda/kernels/packed.h"
#include "cuda/kernels/panels.h"
#include "cuda/kernels/tensor_core.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 16;  // values of a thread

struct Args {
  Panels weight;
  void* out;
  float* factors;
  int64_t depth, runs;  // of a column
  bool wide;            // columns may be written in vectors
};

// Of a weight without groups its scales.
template <int kBits>
__global__ void packed_scales_kernel(Args args) {
  const Panels weight = picked(args.weight);
  const int64_t at = thread_number();
  if (at >= weight.count * kColsOf<kBits>) return;
  const int64_t index = at / kColsOf<kBits>;
  const int col = static_cast<int>(at % kColsOf<kBits>);
  args.factors[at] = fits(weight, index)
                         ? scale_of<kBits>(weight, weight.data + index * weight.bytes, 0, col)
                         : std::numeric_limits<float>::quiet_NaN();
}

// Of a weight with groups 2**7 times the largest power of two in the scales of a column, which has
// a warp: dequantized values divided by it are below 2, and the division is exact.
template <int kBits>
__global__ void packed_factors_kernel(Args args) {
  const Panels weight = picked(args.weight);
  const int64_t at = thread_number() / kWarp;
  if (at >= weight.count * kColsOf<kBits>) return;  // a whole warp, or none
  const uint8_t* panel = weight.data + at / kColsOf<kBits> * weight.bytes;
  int most = 0;
  for (int64_t group = threadIdx.x % kWarp; group < weight.groups; group += kWarp) {
    const float scale = scale_of<kBits>(weight, panel, group, static_cast<int>(at % kColsOf<kBits>));
    most = larger(most, static_cast<int>(float_bits(scale) & 0x7f800000u));
  }
  most = largest_of(most);
  if (threadIdx.x % kWarp != 0) return;
  const bool has_none = most == 0 || most == 0x7f800000;  // zeros, or one that is not finite
  const float power = bits_float(static_cast<uint32_t>(most));
  args.factors[at] = has_none ? 1.0f : power < 0x1p120f ? power * 0x1p7f : power;
}

// X is Int8Values or a float of 16 bits.
template <class X, int kBits, bool kGroups>
__global__ void packed_values_kernel(Args args) {
  constexpr int kLines = kRun / kDepthOf<kBits>, kHalves = kBits == 8 ? 1 : 2;
  const Panels weight = picked(args.weight);
  const int64_t line = thread_number() / kColsOf<kBits>;
  const int col = static_cast<int>(thread_number() % kColsOf<kBits>);
  const int64_t index = line / args.runs, run = line % args.runs;
  if (index >= weight.count) return;
  const uint8_t* panel = weight.data + index * weight.bytes;
  const int64_t from = run * kRun, column = index * kColsOf<kBits> + col;
  int64_t group = 0;  // of all values of a run: groups have a multiple of 32
  float scale = 1.0f;
  if constexpr (kGroups) {
    group = static_cast<uint32_t>(from) / static_cast<uint32_t>(weight.group);
    scale = fits(weight, index) ? scale_of<kBits>(weight, panel, group, col)
                                : std::numeric_limits<float>::quiet_NaN();
    if (args.factors != nullptr) scale /= args.factors[column];
  }
  uint32_t four[kRun / 4];  // bytes of int8
  JAXTAP_UNROLL
  for (int i = 0; i < kLines; ++i) {
    const uint8_t* values = line_of<kBits>(weight, panel, group, run * kLines + i);
    const uint32_t word = reinterpret_cast<const uint32_t*>(values)[col];
    JAXTAP_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      four[kHalves * i + half] = int8_of<kBits>(word >> (4 * half));
    }
  }
  auto* out = static_cast<typename X::Type*>(args.out) + column * args.depth + from;
  if constexpr (sizeof(typename X::Type) == 1) {
    Vector<uint32_t, kRun / 4> all;
    JAXTAP_UNROLL
    for (int i = 0; i < kRun / 4; ++i) all.at[i] = four[i];
    write<kRun / 4>(reinterpret_cast<uint32_t*>(out), all);
  } else {
    JAXTAP_UNROLL
    for (int part = 0; part < kRun; part += 8) {
      float numbers[8];
      JAXTAP_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int at = part + i;
        numbers[i] = static_cast<int8_t>(four[at / 4] >> (8 * (at % 4)) & 0xffu);
        if constexpr (kGroups) numbers[i] *= scale;
      }
      store<X>(out + part, args.depth - from - part, args.wide, numbers);
    }
  }
}

template <class X, int kBits, bool kGroups = false>
void run_values(Args args, int64_t depth, Stream stream) {
  args.depth = depth;
  args.runs = ceil_of(depth, kRun);
  args.wide = depth % 8 == 0;
  const int64_t blocks = ceil_of(args.weight.count * kColsOf<kBits> * args.runs, kThreads);
  launch(packed_values_kernel<X, kBits, kGroups>, blocks, kThreads, stream, args);
}

template <int kBits>
void run(const PackedWeight& given, const Args& args, Stream stream) {
  const int64_t cols = args.weight.count * kColsOf<kBits>;
  const PanelLayout& layout = given.layout;
  const bool is_bf16 = given.dtype == te::Float::kBF16;
  if (layout.group != 0) {
    if (args.factors != nullptr) {
      launch(packed_factors_kernel<kBits>, ceil_of(cols, kThreads / kWarp), kThreads, stream, args);
    }
    if (is_bf16) return run_values<BF16, kBits, true>(args, layout.k, stream);
    return run_values<F16, kBits, true>(args, layout.k, stream);
  }
  launch(packed_scales_kernel<kBits>, ceil_of(cols, kThreads), kThreads, stream, args);
  if (given.as_int8) return run_values<Int8Values, kBits>(args, layout.padded_k(), stream);
  if (is_bf16) return run_values<BF16, kBits>(args, layout.k, stream);
  run_values<F16, kBits>(args, layout.k, stream);
}

}  // namespace

void packed_unpack(const PackedWeight& given, Stream stream) {
  Args args = {};
  args.weight = panels_of(given.weight, given.layout, given.n, given.stack);
  args.out = given.out;
  args.factors = given.factors;
  return given.layout.bits == 8 ? run<8>(given, args, stream) : run<4>(given, args, stream);
}

}  // namespace jaxtap::cuda
