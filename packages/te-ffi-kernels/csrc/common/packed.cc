#include "common/packed.h"

#include <atomic>
#include <cstring>

#include "common/error.h"
#include "common/parallel.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the packed format is read as it lies");

namespace jaxtap {
namespace {

constexpr char kMagic[4] = {'J', 'T', 'W', 'P'};
constexpr int64_t kMostK = int64_t{1} << 31;
constexpr int64_t kMostGroup = int64_t{1} << 16;  // integer sums over a group stay in int32

uint32_t word_at(const uint8_t* bytes, int64_t index) {
  uint32_t word;
  std::memcpy(&word, bytes + 4 * index, 4);
  return word;
}

void put_word(uint8_t* bytes, int64_t index, uint32_t word) {
  std::memcpy(bytes + 4 * index, &word, 4);
}

uint32_t header_sum(const uint8_t* panel) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < 6; ++i) sum += word_at(panel, i);
  return sum ^ 0x9E3779B9u;
}

struct Sums {
  uint32_t plain, weighted;
};

// Payloads are whole lines of 64 bytes. In each of the 16 places of a line, two running sums, as
// Fletcher's: after T lines the second is the sum of (T - t) * w[t], from which the sum of t * w[t]
// follows. That is two additions per word, in vectors on any machine.
Sums payload_sums(const uint8_t* panel, const PanelLayout& layout) {
  constexpr int kPlaces = 16;
  // A quarter of a line. Compilers have these vectors on every machine.
  typedef uint32_t Part __attribute__((vector_size(16)));
  const uint8_t* payload = panel + kPanelHeader;
  const int64_t lines = (layout.panel_bytes() - kPanelHeader) / 64;
  Part first[4] = {}, second[4] = {};
  for (int64_t t = 0; t < lines; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Part words;
      std::memcpy(&words, payload + 64 * t + 16 * i, 16);
      first[i] += words;
      second[i] += first[i];
    }
  }
  Sums sums{0, 0};
  for (uint32_t i = 0; i < kPlaces; ++i) {
    const uint32_t one = first[i / 4][i % 4], two = second[i / 4][i % 4];
    const uint32_t by_line = static_cast<uint32_t>(lines) * one - two;
    sums.plain += one;
    sums.weighted += kPlaces * by_line + (i + 1) * one;
  }
  return sums;
}

uint64_t mix(uint64_t h) {
  h = (h ^ (h >> 32)) * 0xD6E8FEB86659FD93u;
  h = (h ^ (h >> 32)) * 0xD6E8FEB86659FD93u;
  return h ^ (h >> 32);
}

// A payload at an address.
uint64_t key_of(const uint8_t* panel) {
  uint64_t h = reinterpret_cast<uintptr_t>(panel);
  h = mix(h ^ (static_cast<uint64_t>(word_at(panel, 4)) << 32 | word_at(panel, 5)));
  return mix(h ^ (static_cast<uint64_t>(word_at(panel, 6)) << 32 | word_at(panel, 2)));
}

// Weights that passed: a set of keys, four to a bucket. A key that is pushed out only costs another
// check. No locks: each entry is one word.
class Passed {
 public:
  bool has(uint64_t key) const {
    const std::atomic<uint64_t>* bucket = entries_ + start(key);
    for (int i = 0; i < kWays; ++i) {
      if (bucket[i].load(std::memory_order_relaxed) == key) return true;
    }
    return false;
  }

  void add(uint64_t key) {
    std::atomic<uint64_t>* bucket = entries_ + start(key);
    for (int i = 0; i < kWays; ++i) {
      uint64_t empty = 0;
      if (bucket[i].compare_exchange_strong(empty, key, std::memory_order_relaxed)) return;
    }
    bucket[key >> 62].store(key, std::memory_order_relaxed);
  }

  // Has the system back the memory with pages.
  void touch() {
    for (uint64_t i = 0; i < kEntries; i += 512) entries_[i].fetch_or(0, std::memory_order_relaxed);
  }

 private:
  static constexpr int kWays = 4;
  static constexpr uint64_t kEntries = uint64_t{1} << 16;  // 512 KiB

  static uint64_t start(uint64_t key) { return key % (kEntries / kWays) * kWays; }

  std::atomic<uint64_t> entries_[kEntries];
};

Passed passed;  // static, so zero before anything runs

Error bad_panel(int64_t index, const std::string& what) {
  return invalid_argument("packed weight: panel ", index, " ", what,
                          "; weights must come from pack_w8 or pack_w4 and be passed on unchanged");
}

template <typename T>
std::string differs(const char* field, T found, T expected) {
  return error_detail::join("has ", field, " ", found, ", but ", expected, " was expected");
}

}  // namespace

PanelLayout panel_layout(int64_t k, int64_t group, int bits, ScaleKind scale_kind,
                         int table_id) {
  if (bits != 4 && bits != 8) {
    throw invalid_argument("packed weight: bits must be 4 or 8, got ", bits);
  }
  if (k < 0 || k >= kMostK) {
    throw invalid_argument("packed weight: k must be in [0, 2**31), got ", k);
  }
  if (group < 0 || group % 8 != 0 || group > kMostGroup) {
    throw invalid_argument("packed weight: group must be 0 (one scale per column) or a multiple of "
                           "8 up to ", kMostGroup, ", got ", group);
  }
  if (group != 0 && (k == 0 || k % group != 0)) {
    throw invalid_argument("packed weight: group ", group, " does not divide k = ", k,
                           "; choose one that does, or 0 for one scale per column");
  }
  if (table_id < 0 || table_id >= kTableCount || (table_id != 0 && bits == 8)) {
    throw invalid_argument("packed weight: table must be from 0 to ", kTableCount - 1,
                           ", and 0 in 8 bits, got ", table_id, " in ", bits, " bits");
  }
  const Table& table = kTables[table_id];
  const bool is_byte = scale_kind != ScaleKind::kF32 && scale_kind != ScaleKind::kF16;
  const int most_kind = kScaleKinds - 1, kind = static_cast<int>(scale_kind);
  if (kind < 0 || kind > most_kind || (bits == 8 && scale_kind != ScaleKind::kF32) ||
      (is_byte && table.name != std::string("e2m1"))) {
    throw invalid_argument("packed weight: scales must be float32 (0) in 8 bits, float32 or float16 "
                           "(1) in 4 bits, also float8_e8m0fnu (2) or float8_e4m3fn (3) of e2m1, got ",
                           kind, " of ", bits == 8 ? "int8" : table.name);
  }
  if (table.parts > 1 && group == 0) {
    throw invalid_argument("packed weight: ", table.name, " must have groups, got 0");
  }
  PanelLayout layout;
  layout.k = k;
  layout.group = group;
  layout.bits = bits;
  layout.scale_kind = scale_kind;
  layout.table_id = table_id;
  return layout;
}

void write_panel_header(uint8_t* panel, const PanelLayout& layout, int columns) {
  std::memset(panel, 0, kPanelHeader);
  std::memcpy(panel, kMagic, 4);
  panel[4] = static_cast<uint8_t>(layout.version());
  panel[5] = static_cast<uint8_t>(layout.bits);
  panel[6] = static_cast<uint8_t>(columns);
  panel[7] = static_cast<uint8_t>(layout.kind());
  put_word(panel, 2, static_cast<uint32_t>(layout.k));
  put_word(panel, 3, static_cast<uint32_t>(layout.group));
  const Sums sums = payload_sums(panel, layout);
  put_word(panel, 4, sums.plain);
  put_word(panel, 5, sums.weighted);
  put_word(panel, 6, header_sum(panel));
}

uint64_t check_header(const uint8_t* panel, const PanelLayout& layout, int columns,
                      int64_t index) {
  if (std::memcmp(panel, kMagic, 4) != 0) {
    throw bad_panel(index, "must begin with \"JTWP\", as packed weights do");
  }
  if (panel[4] != layout.version()) {
    throw bad_panel(index, differs<int>("format version", panel[4], layout.version()));
  }
  if (word_at(panel, 6) != header_sum(panel)) {
    throw bad_panel(index, "has a corrupted header: its checksum is wrong");
  }
  if (panel[5] != layout.bits) throw bad_panel(index, differs<int>("bits", panel[5], layout.bits));
  if (word_at(panel, 2) != layout.k) {
    throw bad_panel(index, differs<int64_t>("k", word_at(panel, 2), layout.k));
  }
  if (word_at(panel, 3) != layout.group) {
    throw bad_panel(index, differs<int64_t>("group", word_at(panel, 3), layout.group));
  }
  if (panel[6] != columns) throw bad_panel(index, differs<int>("columns", panel[6], columns));
  if (panel[7] != layout.kind()) {
    const char* what = layout.version() == 3 ? "kind of scale and table" : "bits of a scale";
    throw bad_panel(index, differs<int>(what, panel[7], layout.kind()));
  }
  return key_of(panel);
}

void warm_panel_checks() { passed.touch(); }

void check_payloads(const uint8_t* panels, const PanelLayout& layout, int64_t first, int64_t count,
                    uint64_t key, const Parallel& parallel) {
  if (key == 0) key = 1;  // 0 is an empty entry
  if (count == 0 || passed.has(key)) return;
  const int64_t bytes = layout.panel_bytes();
  parallel.ranges(count, (int64_t{1} << 18) / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* panel = panels + i * bytes;
      const Sums sums = payload_sums(panel, layout);
      if (sums.plain != word_at(panel, 4) || sums.weighted != word_at(panel, 5)) {
        throw bad_panel(first + i,
                        "has corrupted quantized values or scales: their checksum is wrong");
      }
    }
  });
  passed.add(key);
}

}  // namespace jaxtap
