// A row, or a group of one, has a block, or where it's short a warp; which reads it twice.
#include <type_traits>

#include "cuda/formats.h"
#include "cuda/kernels/packed.h"
#include "cuda/kernels/tensor_core.h"

namespace jaxtap::cuda {
namespace {

constexpr int kPart = 4, kThreads = 256;
constexpr int64_t kShort = 1024;

struct Args {
  PackedRows given;
  int64_t segments;        // of a row
  int64_t length, padded;  // of a segment
  bool wide;               // rows of x may be read in vectors of 4
};

// Rounds half to even; the last place of what is added is 1.
constexpr float kRounder = 12582912.0f;

JAXTAP_DEVICE float rounded(float x, float divisor) {
  float ratio = x / divisor;
  ratio = ratio == ratio ? ratio : 0.0f;
  ratio = ratio < -127.0f ? -127.0f : ratio;
  ratio = ratio > 127.0f ? 127.0f : ratio;
  return ratio + kRounder;
}

// Out is Int8Values, or the 16 bits of what quantized values mean.
template <class X, class Out, int kTeam>
__global__ void packed_rows_kernel(Args args) {
  constexpr bool kInt8 = std::is_same_v<Out, Int8Values>;
  constexpr float kLeast = 0x1p-126f, kLargestDivisor = 0x1p126f;
  const PackedRows& given = args.given;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (at >= given.padded_m * args.segments) return;  // a whole warp, or none
  const int64_t row = at / args.segments, from = at % args.segments * args.length;
  auto* out = static_cast<typename Out::Type*>(given.qvalues) + row * given.padded_k + from;
  if (row >= given.m) {
    for (int64_t i = threadIdx.x % kTeam * kPart; i < args.padded; i += kTeam * kPart) {
      write<kPart>(out + i, Vector<typename Out::Type, kPart>{});
    }
    return;
  }
  const auto* x = static_cast<const typename X::Type*>(given.x) + row * given.k + from;
  const int64_t first = threadIdx.x % kTeam * kPart;
  int most = 0;  // bits of the largest magnitude: more than those of infinity if there is a NaN
  for (int64_t i = first; i < args.length; i += kTeam * kPart) {
    float numbers[kPart];
    load<X>(x + i, args.length - i, args.wide, numbers);
    JAXTAP_UNROLL
    for (int j = 0; j < kPart; ++j) {
      most = larger(most, static_cast<int>(float_bits(numbers[j]) & 0x7fffffffu));
    }
  }
  if constexpr (kTeam == kWarp) {
    most = largest_of(most);
  } else {
    __shared__ int scratch[kThreads / kWarp];
    most = largest_of_block(most, scratch);
  }
  float scale = bits_float(static_cast<uint32_t>(most)) * (1.0f / 127.0f);
  scale = scale < kLeast ? kLeast : scale;
  const float divisor = scale > kLargestDivisor ? kLargestDivisor : scale;
  if (kInt8 && first == 0) given.scales[at] = scale;
  for (int64_t i = first; i < args.padded; i += kTeam * kPart) {
    float numbers[kPart];
    load<X>(x + i, args.length - i, args.wide, numbers);
    Vector<typename Out::Type, kPart> four;
    JAXTAP_UNROLL
    for (int j = 0; j < kPart; ++j) {
      const float value = rounded(numbers[j], divisor);
      if constexpr (kInt8) {
        four.at[j] = static_cast<int8_t>(float_bits(value) & 0xffu);
      } else {
        four.at[j] = Out::store((value - kRounder) * scale);
      }
    }
    write<kPart>(out + i, four);
  }
}

bool wide_of(const void* x, te::Float dtype, int64_t k) {
  return k % kPart == 0 &&
         aligned(dtype == te::Float::kF32 ? 16 : 8, static_cast<const char*>(x));
}

template <class X, class Out>
void run_teams(const Args& args, Stream stream) {
  const int64_t teams = args.given.padded_m * args.segments;
  if (args.length <= kShort) {
    launch(packed_rows_kernel<X, Out, kWarp>, ceil_of(teams, kThreads / kWarp), kThreads, stream,
           args);
  } else {
    launch(packed_rows_kernel<X, Out, kThreads>, teams, kThreads, stream, args);
  }
}

template <class X>
void run(const Args& args, Stream stream) {
  if (args.given.scales != nullptr) return run_teams<X, Int8Values>(args, stream);
  run_teams<X, std::conditional_t<std::is_same_v<X, F16>, F16, BF16>>(args, stream);
}

}  // namespace

void packed_rows(const PackedRows& given, Stream stream) {
  Args args = {given, 1, given.k, given.padded_k, wide_of(given.x, given.x_dtype, given.k)};
  if (given.group != 0) {
    args.segments = given.k / given.group;
    args.length = args.padded = given.group;
  }
  by_float(given.x_dtype, [&](auto of) { run<decltype(of)>(args, stream); });
}

}  // namespace jaxtap::cuda
