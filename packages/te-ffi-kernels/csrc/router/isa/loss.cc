// Sums over tokens.

#include "common/lanes.h"
#include "router/isa/table.h"

namespace jaxtap::router::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

template <class Format>
void add_rows(const void* from, int64_t count, int64_t experts, float* sums) {
  const auto* row = static_cast<const typename Format::Type*>(from);
  for (; count >= 4; count -= 4, row += 4 * experts) {
    over(experts, [&](int64_t i, auto part) {
      const Floats low = load<Format>(row + i, part) + load<Format>(row + experts + i, part);
      const Floats high =
          load<Format>(row + 2 * experts + i, part) + load<Format>(row + 3 * experts + i, part);
      store<F32>(sums + i, load<F32>(sums + i, part) + (low + high), part);
    });
  }
  for (; count > 0; --count, row += experts) {
    over(experts, [&](int64_t i, auto part) {
      store<F32>(sums + i, load<F32>(sums + i, part) + load<Format>(row + i, part), part);
    });
  }
}

}  // namespace

void set_loss(Table& table) {
  table.add_rows[0] = add_rows<F32>;
  table.add_rows[1] = add_rows<BF16>;
  table.add_rows[2] = add_rows<F16>;
}

}  // namespace jaxtap::router::JAXTAP_ISA_NAMESPACE
