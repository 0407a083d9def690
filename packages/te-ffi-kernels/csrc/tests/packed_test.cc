// The packed format: known bytes, the way there and back, and what corrupted weights are told.
#include <array>
#include <cmath>
#include <cstdlib>

#include "common/error.h"
#include "common/isa.h"
#include "matmul/take.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

struct Kind {
  int bits, scale_bits;
};

constexpr Kind kKinds[] = {{8, 32}, {4, 32}, {4, 16}};

TEST(packed_tables_round_trip) {
  std::mt19937 random(7);
  for (const TableKind& table : kTableKinds) {
    for (int64_t k : {16, 48, 65, 192}) {
      for (int64_t n : {0, 1, 31, 33, 70}) {
        for (int64_t group : {0, 8, 16, 48, 64}) {
          if (group == 0 ? kTables[table.table_id].parts == 2 : k % group != 0) continue;
          const PanelLayout layout = panel_layout(k, group, 4, table.scale_kind, table.table_id);
          CHECK(layout.panel_bytes() % 64 == 0);
          const Weights w = random_weights(n, layout, random, 1 + k % 3);
          std::vector<int8_t> qvalues(w.qvalues.size());
          const std::vector<uint8_t> expected = w.scale_bytes();
          std::vector<uint8_t> scales(expected.size());
          std::vector<float> columns(w.column_scales.size());
          const PackedWeights p = w.packed();
          unpack(w.buffer.get(), p.panels, p.panel_bytes, n, layout, qvalues.data(), scales.data(),
                 Parallel(), columns.data());
          CHECK(qvalues == w.qvalues);
          CHECK(scales == expected);
          CHECK(!layout.has_column_scales() || columns == w.column_scales);
          if (n == 0) continue;
          const uint8_t* b = w.buffer.get();
          CHECK(b[4] == 3 && b[5] == 4);
          CHECK(b[7] == static_cast<int>(table.scale_kind) + 16 * table.table_id);
          for (int64_t row = 0; row < k; ++row) {
            CHECK(panel_number(b, layout, row, 0) == w.number(row, 0));
            CHECK(panel_scale(b, layout, group == 0 ? 0 : row / group, 0) == w.scale(row, 0));
          }
        }
      }
    }
  }
}

// Beside the definitions of the formats.
TEST(packed_tables) {
  constexpr double kE2M1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  constexpr double kNf4[] = {-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
                             -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
                             0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
                             0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                             0.7229568362236023, 1.0};
  const auto at = [](int id, int i) { return kTables[id].values[i] * static_cast<double>(kTables[id].factor); };
  for (int i = 0; i < 16; ++i) {
    CHECK(at(0, i) == i - 8 && kTables[2].factor == 1.0f);
    CHECK(at(1, i) == (i < 8 ? kE2M1[i] : -kE2M1[i - 8]));
    CHECK(std::fabs(at(3, i) - kNf4[i]) <= 8e-6);
    for (const Table& table : kTables) {
      double sum = 0;
      for (int part = 0; part < table.parts; ++part) {
        sum += (table.bytes[part][i] - table.zero_point) * static_cast<double>(table.factors[part]);
      }
      CHECK(std::fabs(sum - table.values[i] * static_cast<double>(table.factor)) <= 1e-12);
    }
  }
}

TEST(packed_round_trip) {
  std::mt19937 random(1);
  Threads pool(2);
  const int64_t ks[] = {0, 1, 3, 4, 7, 8, 63, 64, 65, 130, 192};
  for (const auto& [bits, scale_bits] : kKinds) {
    for (int64_t k : ks) {
      for (int64_t n : {0, 1, 15, 16, 17, 31, 32, 33, 130}) {
        for (int64_t group : {0, 8, 32, 64, 96}) {
          if (group != 0 && (k == 0 || k % group != 0)) continue;
          const PanelLayout layout = panel_layout(k, group, bits, scale_bits);
          const Weights w = random_weights(n, layout, random, 1 + k % 3);
          std::vector<int8_t> qvalues(w.qvalues.size());
          const std::vector<uint8_t> expected = w.scale_bytes();
          std::vector<uint8_t> scales(expected.size());
          const PackedWeights p = w.packed();
          unpack(w.buffer.get(), p.panels, p.panel_bytes, n, layout, qvalues.data(), scales.data(),
                 Parallel(pool));
          CHECK(qvalues == w.qvalues);
          CHECK(scales == expected);
        }
      }
    }
  }
}

// Two groups of 8 rows and 3 columns: scales, then quantized values, then those of the next group.
TEST(packed_stream_bytes) {
  for (int scale_bits : {16, 32}) {
    std::mt19937 random(4);
    const PanelLayout layout = panel_layout(16, 8, 4, scale_bits);
    const Weights w = random_weights(3, layout, random);
    const uint8_t* b = w.buffer.get();
    const int64_t size = scale_bits / 8, group = 32 * size + 128;
    CHECK(w.buffer.size() == 64 + 2 * group);
    CHECK(b[4] == 2 && b[5] == 4 && b[6] == 3 && b[7] == scale_bits);
    const DType type = scale_bits == 16 ? DType::F16 : DType::F32;
    for (int64_t row = 0; row < 16; ++row) {
      const uint8_t* at = b + 64 + row / 8 * group;
      for (int64_t column = 0; column < 32; ++column) {
        const int qvalue = column < 3 ? w.qvalue(row, column) : 0;
        const float scale = column < 3 ? w.scale(row, column) : 0.0f;
        CHECK(element(at, type, column) == static_cast<double>(scale));
        const int byte = at[32 * size + column * 4 + row % 4];
        CHECK((row % 8 < 4 ? byte & 15 : byte >> 4) == qvalue + 8);
      }
    }
  }
}

TEST(packed_bytes) {
  std::mt19937 random(2);
  const Weights w = random_weights(16, 3, 8, 8, random);
  const uint8_t* b = w.buffer.get();
  CHECK(std::memcmp(b, "JTWP", 4) == 0);
  CHECK(b[4] == 1 && b[5] == 8 && b[6] == 3 && b[7] == 0);
  uint32_t words[16];
  std::memcpy(words, b, 64);
  CHECK(words[2] == 16 && words[3] == 8);
  uint32_t plain = 0, weighted = 0;
  const int64_t count = (w.buffer.size() - 64) / 4;
  CHECK(w.buffer.size() == 64 + 2 * 64 + 16 * 16);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, b + 64 + 4 * i, 4);
    plain += word;
    weighted += static_cast<uint32_t>(i + 1) * word;
  }
  CHECK(words[4] == plain && words[5] == weighted);
  uint32_t sum = 0;
  for (int i = 0; i < 6; ++i) sum += words[i];
  CHECK(words[6] == (sum ^ 0x9E3779B9u));
  for (int i = 7; i < 16; ++i) CHECK(words[i] == 0);
  for (int64_t column = 0; column < 16; ++column) {
    for (int64_t row = 0; row < 16; ++row) {
      const int qvalue = column < 3 ? w.qvalue(row, column) : 0;
      CHECK(b[192 + row / 4 * 64 + column * 4 + row % 4] == qvalue + 128);
    }
  }
}

TEST(packed_corruption_is_named) {
  std::mt19937 random(3);
  const auto fails = [&](const std::function<void(uint8_t*)>& spoil, const std::string& message,
                         bool new_sum = false) {
    Weights w = random_weights(64, 20, 0, 8, random);
    const PackedWeights p = w.packed();
    uint8_t* panel = w.buffer.get() + p.panel_bytes;  // the second one
    spoil(panel);
    if (new_sum) {
      uint32_t sum = 0, word;
      for (int i = 0; i < 6; ++i) {
        std::memcpy(&word, panel + 4 * i, 4);
        sum += word;
      }
      sum ^= 0x9E3779B9u;
      std::memcpy(panel + 24, &sum, 4);
    }
    std::vector<float> x(64, 1.0f), y(20);
    Matmul args;
    args.x = x.data();
    args.m = 1;
    args.weights = p;
    args.y = y.data();
    Threads pool(2);
    CHECK(throws<Error>([&] { matmul(args, Parallel(pool), Isa::kGeneric); }, message));
    CHECK(throws<Error>([&] { matmul(args, Parallel(), Isa::kGeneric); }, "panel 1"));
    CHECK(throws<Error>(
        [&] {
          unpack(w.buffer.get(), p.panels, p.panel_bytes, 20, p.layout, w.qvalues.data(),
                 w.scales.data(), Parallel());
        },
        message));
  };
  fails([](uint8_t* b) { b[0] = 'X'; }, "as packed weights do");
  fails([](uint8_t* b) { b[4] = 2; }, "version 2, but 1");
  fails([](uint8_t* b) { b[8] ^= 1; }, "corrupted header");
  fails([](uint8_t* b) { b[5] = 4; }, "bits 4, but 8", true);
  fails([](uint8_t* b) { b[6] = 5; }, "columns 5, but 4", true);
  fails([](uint8_t* b) { b[8] = 65; }, "k 65, but 64", true);
  fails([](uint8_t* b) { b[12] = 8; }, "group 8, but 0", true);
  fails([](uint8_t* b) { b[200] ^= 64; }, "corrupted quantized values or scales");
  fails([](uint8_t* b) { std::swap(b[400], b[404]); b[400] ^= 1; }, "corrupted quantized values or scales");
  fails([](uint8_t* b) { b[64] ^= 1; }, "corrupted quantized values or scales");
}

// A weight that passed is not read again; any other at its address is.
TEST(packed_checks_once_per_weight) {
  std::mt19937 random(5);
  Threads pool(2);
  for (const auto& [bits, scale_bits] : kKinds) {
    for (int64_t m : {1, 40}) {
      const PanelLayout layout = panel_layout(96, 32, bits, scale_bits);
      Weights w = random_weights(200, layout, random);
      std::vector<float> x(static_cast<size_t>(m * 96), 1.0f), y(static_cast<size_t>(m * 200));
      Matmul args;
      args.x = x.data();
      args.m = m;
      args.weights = w.packed();
      args.y = y.data();
      const auto multiplies = [&] { matmul(args, Parallel(pool), Isa::kGeneric); };
      multiplies();
      const int64_t last = (args.weights.panels - 1) * args.weights.panel_bytes;
      uint8_t* const panel = w.buffer.get() + last;
      // The header of the last panel is looked at in each call.
      panel[7] ^= 1;
      CHECK(throws<Error>(multiplies, "corrupted header"));
      panel[7] ^= 1;
      multiplies();
      // New quantized values at the same address are new sums in one header.
      w.qvalues.back() = static_cast<int8_t>(w.qvalues.back() == 0 ? 1 : 0);
      w.pack_again();
      panel[args.weights.panel_bytes - 1] ^= 16;
      CHECK(throws<Error>(multiplies, "corrupted quantized values or scales"));
      panel[args.weights.panel_bytes - 1] ^= 16;
      multiplies();
    }
  }
}

TEST(packed_take_gives_the_values) {
  std::mt19937 random(6);
  Threads pool(2);
  for (const auto& [bits, scale_bits] : kKinds) {
    for (const auto& [k, n, group] : {std::array<int64_t, 3>{1, 1, 0}, {70, 40, 0}, {96, 130, 24}}) {
      const Weights w = random_weights(n, panel_layout(k, group, bits, scale_bits), random,
                                       1);
      for (bool columns : {false, true}) {
        const int32_t size = static_cast<int32_t>(columns ? n : k);
        const int64_t width = columns ? k : n;
        const std::vector<int32_t> indices{0, size - 1, -1, -size - 5, size + 5, size / 2};
        const std::vector<int64_t> places{0, size - 1, size - 1, 0, size - 1, size / 2};
        const int64_t count = static_cast<int64_t>(indices.size());
        for (DType type : {DType::F32, DType::BF16, DType::F16}) {
          Buffer out(count * width * static_cast<int64_t>(byte_size(type)), 1);
          take({w.packed(), indices.data(), count, columns, out.get(), type}, Parallel(pool));
          for (int64_t i = 0; i < count; ++i) {
            for (int64_t j = 0; j < width; ++j) {
              const int64_t place = places[static_cast<size_t>(i)];
              const int64_t row = columns ? j : place, column = columns ? place : j;
              uint8_t bytes[4];
              set_element(bytes, type, 0,
                          static_cast<float>(w.qvalue(row, column)) * w.scale(row, column));
              CHECK(element(out.get(), type, i * width + j) == element(bytes, type, 0));
            }
          }
        }
      }
    }
  }
  std::vector<int32_t> index{0};
  float out = 0;
  const Weights none = random_weights(0, panel_layout(4, 0, 8), random);
  CHECK(throws<Error>([&] { take({none.packed(), index.data(), 1, true, &out}, Parallel()); },
                      "nothing to take from"));
}

TEST(packed_refusals) {
  const auto refused = [](int64_t k, int64_t group, int bits, const std::string& message,
                          int scale_bits = 32) {
    CHECK(throws<Error>([&] { panel_layout(k, group, bits, scale_bits); }, message));
  };
  refused(64, 0, 8, "got 1 of int8", 16);
  const auto refused_table = [](int bits, ScaleKind kind, int table, const std::string& message) {
    CHECK(throws<Error>([&] { panel_layout(64, 0, bits, kind, table); }, message));
  };
  refused_table(4, ScaleKind::kE8M0, 0, "got 2 of int4");
  refused_table(4, ScaleKind::kE4M3, 2, "got 3 of iq4_nl");
  refused_table(4, ScaleKind(4), 1, "got 4 of e2m1");
  refused_table(4, ScaleKind::kF32, 4, "table must be from 0 to 3");
  refused_table(8, ScaleKind::kF32, 1, "0 in 8 bits, got 1");
  refused_table(4, ScaleKind::kF32, 3, "nf4 must have groups, got 0");
  refused(64, 0, 5, "bits must be 4 or 8, got 5");
  refused(64, 12, 8, "multiple of 8 up to 65536, got 12");
  refused(64, -8, 8, "multiple of 8 up to 65536, got -8");
  refused(131072, 131072, 8, "up to 65536, got 131072");
  refused(64, 48, 8, "group 48 does not divide k = 64");
  refused(-1, 0, 8, "k must be");
  std::vector<int8_t> qvalues(64, 0);
  qvalues[17] = 8;
  std::vector<float> scales(1, 1.0f);
  std::vector<uint8_t> out(static_cast<size_t>(panel_layout(64, 0, 4).panel_bytes()));
  const int64_t bytes = static_cast<int64_t>(out.size());
  const auto packing = [&](int64_t panel_bytes) {
    pack(qvalues.data(), scales.data(), 1, panel_layout(64, 0, 4), out.data(), 1, panel_bytes,
         Parallel());
  };
  CHECK(throws<Error>([&] { packing(bytes); }, "got 8 at row 17, column 0"));
  qvalues[17] = 0;
  CHECK(throws<Error>([&] { packing(bytes - 64); }, "are a buffer of [1, "));
  packing(bytes);
  Matmul args;
  float x = 0, y = 0;
  args.x = &x;
  args.y = &y;
  args.m = 1;
  args.weights = PackedWeights{out.data(), 1, bytes, 1, panel_layout(64, 0, 8)};
  CHECK(throws<Error>([&] { matmul(args, Parallel(), Isa::kGeneric); }, "are a buffer of [1, "));
  args.weights.layout.bits = 4;
  args.x_dtype = DType::S8;
  CHECK(throws<Error>([&] { matmul(args, Parallel(), Isa::kGeneric); }, "x must be float32"));
  args.x_dtype = DType::F32;
  args.digits = 4;
  CHECK(throws<Error>([&] { matmul(args, Parallel(), Isa::kGeneric); }, "digits must be"));
}

TEST(isa_names) {
  const std::vector<Isa> found = available_isas();
  CHECK(!found.empty() && found.front() == Isa::kGeneric);
  for (Isa isa : found) CHECK(parse_isa(name(isa)) == isa);
  CHECK(throws<Error>([] { parse_isa("sse9"); }, "\"sse9\" is unknown; this machine has generic"));
  if (!available(Isa::kAmx)) {
    CHECK(throws<Error>([] { parse_isa("amx"); }, "not available on this machine"));
  }
  CHECK(available(selected_isa()));
}

}  // namespace
