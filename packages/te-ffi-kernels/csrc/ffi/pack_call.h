// What packing a weight is given, checked, whatever platform it runs on.

#pragma once

#include "common/packed.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"

namespace jaxtap::ffi {

struct PackConfig {
  template <class Attributes>
  PackConfig(const Attributes& attributes, int given_bits)
      : group(NeedAttribute<int64_t>(attributes, "group")),
        bits(given_bits),
        scale_kind(ScaleKind(AttributeOr<int64_t>(attributes, "scale_kind", 0))),
        table_id(static_cast<int>(AttributeOr<int64_t>(attributes, "table", 0))) {
    LayoutOf(group == 0 ? 1 : group);  // throws for groups that there can't be
  }

  PanelLayout LayoutOf(int64_t k) const { return panel_layout(k, group, bits, scale_kind, table_id); }

  int64_t group;
  int bits;
  ScaleKind scale_kind;
  int table_id;
};

inline constexpr char kPackW8[] = "te_ffi_kernels.pack_w8";
inline constexpr char kPackW4[] = "te_ffi_kernels.pack_w4";

template <const char* kName, int kBits>
struct PackCall {
  static constexpr const char* kTarget = kName;
  struct Config : PackConfig {
    template <class Attributes>
    explicit Config(const Attributes& attributes) : PackConfig(attributes, kBits) {}
  };

  template <class Call>
  explicit PackCall(const Call& call)
      : config(Checked(call)),
        qvalues(call.Operand(0, "qvalue")),
        scale(call.Operand(1, "scale")),
        buffer(call.Result(0, "buffer")) {
    qvalues.NeedRank(2).NeedDtype({DType::S8});
    layout = config.LayoutOf(qvalues.shape[0]);
    constexpr DType kScales[kScaleKinds] = {DType::F32, DType::F16, DType::F8E8M0,
                                            DType::F8E4M3FN};
    const int64_t n = qvalues.shape[1];
    scale.NeedDtype({kScales[static_cast<int>(layout.scale_kind)]})
        .NeedShape({layout.scales(), n}, "groups and the columns of quantized values");
    if (layout.has_column_scales()) {
      const Array given = call.Operand(2, "column_scale");
      column_scales =
          given.NeedDtype({DType::F32}).NeedShape({n}, "that of the columns of quantized values").data;
    }
    buffer.NeedDtype({DType::U8})
        .NeedShape({panel_count(n, layout.columns()), layout.panel_bytes()},
                   "panels and the bytes of one");
  }

  template <class Call>
  static Config Checked(const Call& call) {
    const Config config(call.attributes);
    call.NeedCounts(2 + (config.scale_kind == ScaleKind::kE4M3), 1);
    return config;
  }

  Config config;
  Array qvalues, scale, buffer;
  const void* column_scales = nullptr;  // where the layout has them
  PanelLayout layout;                   // of the buffer
};

}  // namespace jaxtap::ffi
