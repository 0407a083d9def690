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
        bits(given_bits) {
    panel_layout(group == 0 ? 1 : group, group, bits);  // throws for groups that there can't be
  }

  int64_t group;
  int bits;
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
      : config(ConfigOf<Config>(call, 2, 1)),
        qvalues(call.Operand(0, "qvalue")),
        scale(call.Operand(1, "scale")),
        buffer(call.Result(0, "buffer")) {
    qvalues.NeedRank(2).NeedDtype({DType::S8});
    scale.NeedDtype({DType::F32, DType::F16});
    layout = panel_layout(qvalues.shape[0], config.group, kBits, scale.dtype == DType::F32 ? 32 : 16);
    const int64_t n = qvalues.shape[1];
    scale.NeedShape({layout.scales(), n}, "groups and the columns of quantized values");
    buffer.NeedDtype({DType::U8})
        .NeedShape({panel_count(n, layout.columns()), layout.panel_bytes()},
                   "panels and the bytes of one");
  }

  Config config;
  Array qvalues, scale, buffer;
  PanelLayout layout;  // of the buffer
};

}  // namespace jaxtap::ffi
