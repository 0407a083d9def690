// What a product with a packed weight is given, checked, whatever platform it runs on.

#pragma once

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

  // Throws for a weight that there can't be.
  PanelLayout Check() const {
    const PanelLayout layout = panel_layout(k, group, bits);
    if (n < 0) throw invalid_argument("n is ", n, ", and must be at least 0");
    return layout;
  }
};

template <class Attributes>
ProductConfig ProductConfigOf(const Attributes& attributes, int bits) {
  return {NeedAttribute<int64_t>(attributes, "k"), NeedAttribute<int64_t>(attributes, "n"),
          NeedAttribute<int64_t>(attributes, "group"), bits};
}

struct ProductCall {
  Array x, buffer, y;

  // But for the buffer's shape.
  void Check(const ProductConfig& config) const {
    x.NeedRank(2).NeedDtype({DType::F32, DType::BF16, DType::F16});
    x.NeedShape({x.shape[0], config.k}, "rows and the attribute k");
    buffer.NeedRank(2).NeedDtype({DType::U8});
    y.NeedDtype({DType::F32, DType::BF16, DType::F16})
        .NeedShape({x.shape[0], config.n}, "the rows of x and the attribute n");
  }
};

}  // namespace jaxtap::ffi
