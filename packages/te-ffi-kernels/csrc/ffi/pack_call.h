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

  // Throws for groups that there can't be.
  void Check() const {
    if (group != 0) panel_layout(group, group, bits);
  }
};

template <class Attributes>
PackConfig PackConfigOf(const Attributes& attributes, int bits) {
  return {NeedAttribute<int64_t>(attributes, "group"), bits};
}

struct PackCall {
  Array codes, scale, buffer;

  void Check(const PackConfig& config) const {
    codes.NeedRank(2).NeedDtype({DType::S8});
    const PanelLayout layout = panel_layout(codes.shape[0], config.group, config.bits);
    const int64_t n = codes.shape[1];
    scale.NeedDtype({DType::F32})
        .NeedShape({layout.scales(), n}, "groups and the columns of codes");
    buffer.NeedDtype({DType::U8}).NeedShape({panel_count(n), layout.panel_bytes()},
                                            "panels of 16 columns and the bytes of one");
  }
};

}  // namespace jaxtap::ffi
