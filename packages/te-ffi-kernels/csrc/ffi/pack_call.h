// What packing a weight is given, checked, whatever platform it runs on.

#pragma once

#include "common/packed.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"

namespace jaxtap::ffi {

// What it's told at compile time.
struct PackConfig {
  int64_t group;
  int bits;
  int64_t version;  // of the format

  // Throws for groups and versions that there can't be.
  void Check() const { Layout(group == 0 ? 1 : group, 32); }

  PanelLayout Layout(int64_t k, int scale_bits) const {
    return panel_layout(k, group, bits, static_cast<int>(version), scale_bits);
  }
};

template <class Attributes>
PackConfig PackConfigOf(const Attributes& attributes, int bits) {
  return {NeedAttribute<int64_t>(attributes, "group"), bits,
          AttributeOr<int64_t>(attributes, "version", 1)};
}

struct PackCall {
  Array codes, scale, buffer;

  // Returns the layout of the buffer.
  PanelLayout Check(const PackConfig& config) const {
    codes.NeedRank(2).NeedDtype({DType::S8});
    scale.NeedDtype({DType::F32, DType::F16});
    const int scale_bits = scale.dtype == DType::F32 ? 32 : 16;
    const PanelLayout layout = config.Layout(codes.shape[0], scale_bits);
    const int64_t n = codes.shape[1];
    scale.NeedShape({layout.scales(), n}, "groups and the columns of codes");
    buffer.NeedDtype({DType::U8})
        .NeedShape({panel_count(n, layout.columns()), layout.panel_bytes()},
                   "panels and the bytes of one");
    return layout;
  }
};

}  // namespace jaxtap::ffi
