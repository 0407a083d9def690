// How fast matmuls are, beside what this machine's memory and multipliers can do at most.
//   kernel_bench [isa [part of a label]]
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>

#include "common/isa.h"
#include "tests/weights.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

double seconds_of(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// What few of many runs take less than, in seconds: the machine may be busy otherwise. Work of one
// thread is measured in its own time, which at times is told wrong: no minimum.
template <typename Body>
double duration(int threads, const Body& body, double seconds = 0.4) {
  const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  std::vector<double> taken;
  for (double spent = 0; taken.size() < 5 || spent < seconds; spent += taken.back()) {
    const double start = seconds_of(clock);
    body();
    taken.push_back(seconds_of(clock) - start);
  }
  std::sort(taken.begin(), taken.end());
  return taken[taken.size() / 10];
}

volatile uint64_t sink;

uint64_t read_all(const uint8_t* data, int64_t bytes) {
#if defined(__AVX512VNNI__)
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    a = _mm512_xor_si512(a, _mm512_loadu_si512(data + i));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(data + i + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(data + i + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(data + i + 192));
  }
  a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(a));
#else
  uint64_t sum = 0;
  for (int64_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, 8);
    sum ^= word;
  }
  return sum;
#endif
}

// Operations per second of multiply-add instructions on registers alone, by one thread.
double peak() {
#if defined(__AVX512VNNI__)
  constexpr int kSteps = 50000;
  const double seconds = duration(1, [] {
    for (int i = 0; i < kSteps; ++i) {
      // Whatever the registers hold: 12 sums that do not wait for each other.
#define STEP(sum) "vpdpbusd %%zmm30, %%zmm31, %%zmm" #sum "\n\t"
      __asm__ volatile(STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8)
                           STEP(9) STEP(10) STEP(11)::
                               : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
                                 "xmm8", "xmm9", "xmm10", "xmm11");
#undef STEP
    }
  });
  return 12.0 * kSteps * 128 / seconds;
#else
  return 0;
#endif
}

struct Shape {
  const char* label;
  int64_t m, k, n, group;
  int bits, digits;
  DType type;
  bool cold;
  int scale_bits = 32;
  TableKind table = {0, ScaleKind::kF32};
};

void run(const Shape& s, Isa isa, int threads, const std::vector<Weights>& copies, double best) {
  Threads pool(threads);
  const Parallel parallel(pool);
  const int64_t size = static_cast<int64_t>(byte_size(s.type));
  Buffer x(s.m * s.k * size, 0), y(s.m * s.n * size, 0);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < s.m * s.k; ++i) set_element(x.get(), s.type, i, normal(random));
  Matmul args;
  args.x = x.get();
  args.x_dtype = args.y_dtype = s.type;
  args.m = s.m;
  args.y = y.get();
  args.digits = s.digits;
  const size_t used = s.cold ? copies.size() : 1;
  const double seconds = duration(threads, [&] {
    for (size_t i = 0; i < used; ++i) {
      args.weights = copies[i].packed();
      matmul(args, parallel, isa);
    }
  }) / static_cast<double>(used);
  const double bytes = static_cast<double>(copies[0].buffer.size());
  const double ops = 2.0 * static_cast<double>(s.m) * static_cast<double>(s.k * s.n);
  std::printf("%-24s m=%-5ld %5ldx%-5ld g=%-4ld %d threads %9.1f us %7.1f GB/s %8.1f GOP/s",
              s.label, static_cast<long>(s.m), static_cast<long>(s.k), static_cast<long>(s.n),
              static_cast<long>(s.group), threads, seconds * 1e6, bytes / seconds / 1e9,
              ops / seconds / 1e9);
  if (best > 0) std::printf(" %4.0f %% of peak", 100 * ops / seconds / best / threads);
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const Isa isa = argc > 1 ? parse_isa(argv[1]) : selected_isa();
  const double best = peak();
  std::printf("isa %s; multiply-add peak of a thread: %.0f GOP/s\n", name(isa), best / 1e9);
  const int64_t kRead = int64_t{128} << 20;
  std::vector<uint8_t> large(static_cast<size_t>(kRead), 1);
  for (int threads : {1, 2}) {
    Threads pool(threads);
    for (int64_t bytes : {kRead, kRead / 8}) {
      const double seconds = duration(threads, [&] {
        Parallel(pool).run(threads * 8, [&](int64_t i) {
          sink = read_all(large.data() + i * (bytes / threads / 8), bytes / threads / 8);
        });
      });
      std::printf("reading %3ld MiB, %d threads: %.1f GB/s\n", static_cast<long>(bytes >> 20),
                  threads, static_cast<double>(bytes) / seconds / 1e9);
    }
  }
  const DType f32 = DType::F32, bf16 = DType::BF16;
  const std::vector<std::vector<Shape>> sets = {
      {{"int8 gemv, cold", 1, 4096, 4096, 0, 8, 0, bf16, true},
       {"int8 gemv, hot", 1, 4096, 4096, 0, 8, 0, bf16, false},
       {"w8a8, cold", 1, 4096, 4096, 0, 8, 1, bf16, true},
       {"weight-only int8, cold", 4, 4096, 4096, 0, 8, 0, f32, true},
       {"w8a8", 8, 4096, 4096, 0, 8, 1, f32, false},
       {"w8a8", 128, 4096, 4096, 0, 8, 1, f32, false},
       {"w8a8", 512, 4096, 4096, 0, 8, 1, f32, false},
       {"w8a8", 1024, 4096, 4096, 0, 8, 1, f32, false},
       {"weight-only f32", 512, 4096, 4096, 0, 8, 0, f32, false},
       {"weight-only bf16", 512, 4096, 4096, 0, 8, 0, bf16, false}},
      {{"int4 gemv, float16, cold", 1, 4096, 4096, 32, 4, 0, bf16, true, 16},
       {"int4 gemv, float16, hot", 1, 4096, 4096, 32, 4, 0, bf16, false, 16}},
      {{"int4 gemv, cold", 1, 4096, 4096, 32, 4, 0, bf16, true},
       {"int4 gemv, hot", 1, 4096, 4096, 32, 4, 0, bf16, false},
       {"w4a8, cold", 1, 4096, 4096, 32, 4, 1, bf16, true},
       {"w4a8", 512, 4096, 4096, 32, 4, 1, f32, false},
       {"weight-only bf16", 512, 4096, 4096, 32, 4, 0, bf16, false}},
      {{"mxfp4 gemv, cold", 1, 4096, 4096, 32, 4, 0, bf16, true, 32, {1, ScaleKind::kE8M0}},
       {"mxfp4 gemv, hot", 1, 4096, 4096, 32, 4, 0, bf16, false, 32, {1, ScaleKind::kE8M0}},
       {"mxfp4 w4a8", 512, 4096, 4096, 32, 4, 1, f32, false, 32, {1, ScaleKind::kE8M0}},
       {"mxfp4 weight-only", 512, 4096, 4096, 32, 4, 0, bf16, false, 32, {1, ScaleKind::kE8M0}}},
      {{"nvfp4 gemv, cold", 1, 4096, 4096, 16, 4, 0, bf16, true, 32, {1, ScaleKind::kE4M3}},
       {"nvfp4 gemv, hot", 1, 4096, 4096, 16, 4, 0, bf16, false, 32, {1, ScaleKind::kE4M3}},
       {"nvfp4 weight-only", 512, 4096, 4096, 16, 4, 0, bf16, false, 32, {1, ScaleKind::kE4M3}}},
      {{"iq4_nl gemv, cold", 1, 4096, 4096, 32, 4, 0, bf16, true, 32, {2, ScaleKind::kF16}},
       {"iq4_nl gemv, hot", 1, 4096, 4096, 32, 4, 0, bf16, false, 32, {2, ScaleKind::kF16}},
       {"iq4_nl weight-only", 512, 4096, 4096, 32, 4, 0, bf16, false, 32, {2, ScaleKind::kF16}}},
      {{"nf4 gemv, cold", 1, 4096, 4096, 64, 4, 0, bf16, true, 32, {3, ScaleKind::kF32}},
       {"nf4 gemv, hot", 1, 4096, 4096, 64, 4, 0, bf16, false, 32, {3, ScaleKind::kF32}},
       {"nf4 w4a8", 512, 4096, 4096, 64, 4, 1, f32, false, 32, {3, ScaleKind::kF32}},
       {"nf4 weight-only", 512, 4096, 4096, 64, 4, 0, bf16, false, 32, {3, ScaleKind::kF32}}},
      {{"int4 gemv, cold", 1, 4096, 4096, 128, 4, 0, bf16, true},
       {"w4a8", 512, 4096, 4096, 128, 4, 1, f32, false}},
      {{"int4 gemv, cold", 1, 4096, 4096, 0, 4, 0, bf16, true},
       {"w4a8", 512, 4096, 4096, 0, 4, 1, f32, false}},
      {{"MiniLM", 1024, 384, 1152, 0, 8, 1, f32, false}},
      {{"MiniLM", 32, 384, 384, 0, 8, 1, f32, false},
       {"MiniLM", 1024, 384, 384, 0, 8, 1, f32, false}},
      {{"MiniLM", 32, 384, 1536, 0, 8, 1, f32, false},
       {"MiniLM", 1024, 384, 1536, 0, 8, 1, f32, false}},
      {{"MiniLM", 32, 1536, 384, 0, 8, 1, f32, false},
       {"MiniLM", 1024, 1536, 384, 0, 8, 1, f32, false}}};
  std::mt19937 random(1);
  for (const std::vector<Shape>& set : sets) {
    const Shape& s = set[0];
    const int count = s.cold ? (s.bits == 8 ? 5 : 9) : 1;
    std::vector<Weights> copies;
    for (int i = 0; i < count; ++i) {
      const PanelLayout layout =
          s.table.table_id == 0 ? panel_layout(s.k, s.group, s.bits, s.scale_bits)
                                : panel_layout(s.k, s.group, 4, s.table.scale_kind, s.table.table_id);
      copies.push_back(random_weights(s.n, layout, random));
    }
    for (const Shape& shape : set) {
      if (argc > 2 && std::string(shape.label).find(argv[2]) == std::string::npos) continue;
      for (int threads : {1, 2}) run(shape, isa, threads, copies, best);
    }
  }
  return 0;
}
