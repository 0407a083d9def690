// What a product with a packed weight is given, checked, whatever platform it runs on.

#pragma once

#include <algorithm>
#include <vector>

#include "common/packed.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"

namespace jaxtap::ffi {

// What it's told at compile time.
struct ProductConfig {
  int64_t k;
  int64_t n;
  int64_t group;
  int bits;
  int64_t version;     // of the format
  int64_t scale_bits;

  // Throws for a weight that there can't be.
  PanelLayout Check() const {
    const PanelLayout layout = panel_layout(k, group, bits, static_cast<int>(version),
                                            static_cast<int>(scale_bits));
    if (n < 0) throw invalid_argument("n is ", n, ", and must be at least 0");
    return layout;
  }
};

template <class Attributes>
ProductConfig ProductConfigOf(const Attributes& attributes, int bits) {
  return {NeedAttribute<int64_t>(attributes, "k"), NeedAttribute<int64_t>(attributes, "n"),
          NeedAttribute<int64_t>(attributes, "group"), bits,
          AttributeOr<int64_t>(attributes, "version", 1),
          AttributeOr<int64_t>(attributes, "scale_bits", 32)};
}

struct ProductCall {
  Array x, buffer, y;

  // But for the buffer's shape.
  void Check(const ProductConfig& config) const {
    x.NeedRank(2).NeedDtype({DType::F32, DType::BF16, DType::F16});
    x.NeedShape({x.shape[0], config.k}, "rows and the attribute k");
    buffer.NeedDtype({DType::U8});
    y.NeedDtype({DType::F32, DType::BF16, DType::F16})
        .NeedShape({x.shape[0], config.n}, "the rows of x and the attribute n");
  }
};

// The buffer of one weight of a stack [weights, panels, panel_bytes]. A negative index counts from
// the end, and one beyond the ends is the end, as XLA's slices have it.
inline const uint8_t* OneOfStack(const Array& stack, int32_t index) {
  const int64_t count = stack.shape[0];
  if (count == 0) throw invalid_argument("buffer is ", stack.Text(), ", and must have a weight");
  const int64_t wrapped = index < 0 ? index + count : index;
  const int64_t place = std::clamp<int64_t>(wrapped, 0, count - 1);
  return static_cast<const uint8_t*>(stack.data) + place * stack.Product(1, 3);
}

// Where the rows of each group end, of `rows` rows of x in all. Throws for sizes that are negative.
// Rows that there are not are left out of the last groups.
inline std::vector<int64_t> EndsOfGroups(const Array& sizes, int64_t rows) {
  std::vector<int64_t> ends;
  int64_t end = 0;
  for (int64_t group = 0; group < sizes.shape[0]; ++group) {
    const int32_t size = static_cast<const int32_t*>(sizes.data)[group];
    if (size < 0) {
      throw invalid_argument("group_sizes[", group, "] is ", size, ", and must be at least 0");
    }
    end = std::min(rows, end + size);
    ends.push_back(end);
  }
  return ends;
}

}  // namespace jaxtap::ffi
