// A thread has 16 quantized values that follow each other.
#include "cuda/kernels/dequantize.h"

#include "cuda/formats.h"

namespace jaxtap::cuda {
namespace {

constexpr int kChunk = 16, kThreads = 256;

enum class Scales { kOne, kOfRows, kOfBlocks, kOfColumnBlocks };

struct Args {
  const uint8_t* qvalues;
  const void* scales;
  void* out;
  int64_t count, cols;
  QType qtype;
  bool wide;
};

template <class Format, Scales kScales>
__global__ void dequantize_kernel(Args args) {
  const int64_t at = thread_number() * kChunk;
  const int64_t left = args.count - at;
  if (left <= 0) return;
  float x[kChunk];
  if (args.wide && left >= kChunk) {
    const auto bytes = read<kChunk>(args.qvalues + at);
    JAXTAP_UNROLL
    for (int i = 0; i < kChunk; ++i) x[i] = decode(args.qtype, bytes.at[i]);
  } else {
    JAXTAP_UNROLL
    for (int i = 0; i < kChunk; ++i) x[i] = i < left ? decode(args.qtype, args.qvalues[at + i]) : 0;
  }
  const auto* numbers = static_cast<const float*>(args.scales);
  const auto* powers = static_cast<const uint8_t*>(args.scales);
  if constexpr (kScales == Scales::kOne) {
    const float scale = numbers[0];
    JAXTAP_UNROLL
    for (int i = 0; i < kChunk; ++i) x[i] *= scale;
  } else if constexpr (kScales == Scales::kOfBlocks) {
    const auto scale = quantized::power(powers[at / te::kBlock]);
    JAXTAP_UNROLL
    for (int i = 0; i < kChunk; ++i) x[i] = x[i] * scale.factor * scale.half;
  } else {
    int64_t row = at / args.cols, col = at % args.cols;
    JAXTAP_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      if (i < left) {
        if constexpr (kScales == Scales::kOfRows) {
          x[i] *= numbers[row];
        } else {
          const auto scale = quantized::power(powers[row / te::kBlock * args.cols + col]);
          x[i] = x[i] * scale.factor * scale.half;
        }
      }
      if (++col == args.cols) {
        col = 0;
        ++row;
      }
    }
  }
  auto* out = static_cast<typename Format::Type*>(args.out) + at;
  JAXTAP_UNROLL
  for (int i = 0; i < kChunk; i += kWide<Format>) {
    float part[kWide<Format>];
    JAXTAP_UNROLL
    for (int j = 0; j < kWide<Format>; ++j) part[j] = x[i + j];
    store<Format>(out + i, left - i, args.wide, part);
  }
}

template <class Format>
void run(const Args& args, const Dequantize& given, Stream stream) {
  const int64_t blocks = ceil_of(args.count, kChunk * kThreads);
  if (te::is_tensor(given.scaling)) {
    launch(dequantize_kernel<Format, Scales::kOne>, blocks, kThreads, stream, args);
  } else if (given.scaling == te::Scaling::kChannel) {
    launch(dequantize_kernel<Format, Scales::kOfRows>, blocks, kThreads, stream, args);
  } else if (given.by_column) {
    launch(dequantize_kernel<Format, Scales::kOfColumnBlocks>, blocks, kThreads, stream, args);
  } else {
    launch(dequantize_kernel<Format, Scales::kOfBlocks>, blocks, kThreads, stream, args);
  }
}

}  // namespace

void dequantize(const Dequantize& given, Stream stream) {
  const Args args = {given.qvalues,
                     given.scales,
                     given.out,
                     given.rows * given.cols,
                     given.cols,
                     given.qtype,
                     aligned(16, given.qvalues, static_cast<uint8_t*>(given.out))};
  by_float(given.dtype, [&](auto of) { run<decltype(of)>(args, given, stream); });
}

}  // namespace jaxtap::cuda
