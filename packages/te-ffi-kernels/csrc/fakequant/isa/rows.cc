// Extremes of numbers, and their rounding to a grid. Equal bit for bit for all instruction sets.

#include "common/lanes_math.h"
#include "fakequant/table.h"

namespace jaxtap::fakequant::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

template <class Format>
Extremes extremes(const void* from, int64_t count) {
  const auto* x = static_cast<const typename Format::Type*>(from);
  Floats low = all(0.0f), high = low, low2 = low, high2 = low;
  Ints bad{}, bad2{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Floats a = load<Format>(x + i), b = load<Format>(x + i + kLanes);
    low = min(a, low);
    high = max(a, high);
    bad |= a != a;
    low2 = min(b, low2);
    high2 = max(b, high2);
    bad2 |= b != b;
  }
  over(count - i, [&](int64_t j, auto part) {
    const Floats a = load<Format>(x + i + j, part);
    low = min(a, low);
    high = max(a, high);
    bad |= a != a;
  });
  // Floats, since -1 is a NaN.
  const Floats none = same_bits<Floats>(bad | bad2);
  const Floats nan = none != none ? all(1.0f) : all(0.0f);
  if (largest_of(nan) > 0.0f) return {__builtin_nanf(""), __builtin_nanf("")};
  return {-largest_of(-min(low, low2)), largest_of(max(high, high2))};
}

template <class Format>
void round(const void* from, void* to, uint8_t* inside, const Rows& rows, const Grid& grid,
           const Extremes& bounds) {
  // 1.5 * 2^23: a sum with it is rounded to whole numbers, half to even. Steps are far below 2^22,
  // since they are clipped first; the ends are whole numbers.
  constexpr float kRound = 12582912.0f;
  using Type = typename Format::Type;
  const auto* x = static_cast<const Type*>(from);
  auto* out = static_cast<Type*>(to);
  const Floats least = all(grid.least), most = all(grid.most);
  const Floats lower = rounded<Format>(all(bounds.lower));
  const Floats upper = rounded<Format>(all(bounds.upper));
  over(rows.count, [&](int64_t i, auto part) {
    Bytes bits{};
    for (int64_t row = 0; row < rows.rows; ++row) {
      const int64_t at = row * rows.stride + i;
      const Floats number = load<Format>(x + at, part);
      // So written that NaN goes through.
      const Floats cut = max(least, min(most, number * grid.reciprocal));
      store<Format>(out + at, (cut + kRound - kRound) * grid.scale, part);
      const auto bit = static_cast<uint8_t>(1u << row);
      bits |= mask_bytes((number >= lower) & (number <= upper), bit);
    }
    write(inside + i, bits, part);
  });
}

}  // namespace

const Table& make_table() {
  static const Table table = {
      {extremes<F32>, extremes<BF16>, extremes<F16>},
      {round<F32>, round<BF16>, round<F16>},
  };
  return table;
}

}  // namespace jaxtap::fakequant::JAXTAP_ISA_NAMESPACE
