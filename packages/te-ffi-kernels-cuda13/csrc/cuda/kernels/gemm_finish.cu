// A thread has four numbers of a row. Products and sums are in the order of the CPU's kernel.
#include <limits>

#include "cuda/formats.h"
#include "cuda/kernels/gemm.h"

namespace jaxtap::cuda {
namespace {

constexpr int kPart = 4, kThreads = 256;

struct Args {
  GemmFinish given;
  int64_t parts;  // of a row
  bool wide;      // rows of the result and the bias may be read and written in vectors of 4
};

// x * Phi(x) in the form with tanh, which is written with exp so that nothing cancels.
JAXTAP_DEVICE float gelu(float x) {
  const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.0f + expf(-2.0f * inner));
}

template <class Format>
__global__ void gemm_finish_kernel(Args args) {
  const GemmFinish& given = args.given;
  const int64_t at = thread_number();
  if (at >= given.m * args.parts) return;
  const int64_t row = at / args.parts, col = at % args.parts * kPart;
  const int64_t left = given.n - col;
  const auto* sums = static_cast<const uint32_t*>(given.sums) + row * given.stride + col;
  Vector<uint32_t, kPart> bits = {};
  if (args.wide) {
    bits = read<kPart>(sums);
  } else {
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) {
      if (i < left) bits.at[i] = sums[i];
    }
  }
  float bias[kPart] = {};
  using Number = typename Format::Type;
  if (given.bias != nullptr) {
    load<Format>(static_cast<const Number*>(given.bias) + col, left, args.wide, bias);
  }
  const float alpha = given.alpha == nullptr ? 1.0f : *given.alpha;
  const bool good = given.beta == nullptr || *given.beta == 0.0f;
  const float bad = good ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  float x[kPart];
  JAXTAP_UNROLL
  for (int i = 0; i < kPart; ++i) {
    x[i] = given.exact ? static_cast<float>(static_cast<int32_t>(bits.at[i]))
                       : bits_float(bits.at[i]);
    if (given.per_lane) {
      if (given.lhs_scales != nullptr) x[i] *= given.lhs_scales[row];
      if (given.rhs_scales != nullptr && i < left) x[i] *= given.rhs_scales[col + i];
    } else if (given.lhs_scales != nullptr) {
      x[i] *= *given.lhs_scales * *given.rhs_scales;
    }
    x[i] *= alpha;
    if (given.bias != nullptr) x[i] += bias[i];
    if (given.gelu) x[i] = gelu(x[i]);
    if (bad != 0.0f) x[i] = bad;
  }
  store<Format>(static_cast<Number*>(given.out) + row * given.out_stride + col, left, args.wide, x);
}

}  // namespace

void gemm_finish(const GemmFinish& given, Stream stream) {
  Args args = {given, ceil_of(given.n, kPart), false};
  if (given.out_stride == 0) args.given.out_stride = given.n;
  const size_t bytes = given.dtype == te::Float::kF32 ? 16 : 8;
  const bool wide = given.n % kPart == 0 && given.stride % kPart == 0 &&
                    args.given.out_stride % kPart == 0 &&
                    aligned(16, static_cast<const char*>(given.sums)) &&
                    aligned(bytes, static_cast<const char*>(given.bias),
                            static_cast<const char*>(given.out));
  args.wide = wide;
  const int64_t blocks = ceil_of(given.m * args.parts, kThreads);
  by_float(given.dtype, [&](auto of) {
    launch(gemm_finish_kernel<decltype(of)>, blocks, kThreads, stream, args);
  });
}

}  // namespace jaxtap::cuda
