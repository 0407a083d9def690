// What a matmul with a packed weight is given, checked, whatever platform it runs on.

#pragma once

#include "common/packed.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"

namespace jaxtap::ffi {

struct MatmulConfig {
  template <class Attributes>
  MatmulConfig(const Attributes& attributes, int bits)
      : n(NeedAttribute<int64_t>(attributes, "n")),
        layout(panel_layout(NeedAttribute<int64_t>(attributes, "k"),
                            NeedAttribute<int64_t>(attributes, "group"), bits,
                            ScaleKind(AttributeOr<int64_t>(attributes, "scale_kind", 0)),
                            static_cast<int>(AttributeOr<int64_t>(attributes, "table", 0)))),
        rotation(AttributeOr<int64_t>(attributes, "rotation", 0)),
        scaled(AttributeOr<int64_t>(attributes, "x_scale", 0) != 0) {
    if (n < 0) throw invalid_argument("n must be at least 0, got ", n);
    if (n >= int64_t{1} << 31) throw invalid_argument("n must be below 2**31, got ", n);
    if (rotation != 0 &&
        (rotation < 2 || (rotation & (rotation - 1)) != 0 || layout.k % rotation != 0)) {
      throw invalid_argument("rotation must be 0 or a power of two from 2 that divides k, got ",
                             rotation);
    }
  }

  int64_t n;
  PanelLayout layout;
  int64_t rotation;  // the block in which rows of x are rotated by signs, an operand; or 0
  bool scaled;       // whether rows of x have a scale that is given: an operand after the signs
  bool bias = false, residual = false;  // whether they are operands, the last ones
  bool clamps = false;                  // whether results are cut in the end
  float least = 0.0f, most = 0.0f;      // between these
};

// One target for each pair of bits: everything else about a matmul is an attribute.
inline constexpr char kGemmW8A8[] = "te_ffi_kernels.gemm_w8a8";
inline constexpr char kGemmW8A16[] = "te_ffi_kernels.gemm_w8a16";
inline constexpr char kGemmW4A8[] = "te_ffi_kernels.gemm_w4a8";
inline constexpr char kGemmW4A16[] = "te_ffi_kernels.gemm_w4a16";

// The attribute `name`, which says whether there is an operand.
template <class Attributes>
bool Given(const Attributes& attributes, const char* name) {
  const auto given = NeedAttribute<int64_t>(attributes, name);
  if (given != 0 && given != 1) throw invalid_argument(name, " must be 0 or 1, got ", given);
  return given == 1;
}

// Between which results are cut in the end.
template <class Attributes>
void ReadClamp(const Attributes& attributes, MatmulConfig& config) {
  config.clamps = Given(attributes, "clamps");
  if (!config.clamps) return;
  config.least = static_cast<float>(NeedAttribute<double>(attributes, "least"));
  config.most = static_cast<float>(NeedAttribute<double>(attributes, "most"));
}

// The attribute `name`, which is left out where there is no operand of that kind.
template <class Attributes>
bool MaybeGiven(const Attributes& attributes, const char* name) {
  return attributes.contains(name) && Given(attributes, name);
}

// A matmul of x[m, k] with a weight. Its operands, of which all but the first two are there where an
// attribute says so:
//   x[m, k]
//   buffer[panels, bytes], or [weights, panels, bytes] where an index or sizes of groups follow
//   index[], which weight of the stack; or [groups], which of them each group of rows has
//   group_sizes[groups]
//   signs[k], x_scale[], bias[n], residual[m, n]
template <const char* kName, int kBits, int kActivationBits>
struct MatmulCall {
  static constexpr const char* kTarget = kName;
  static constexpr bool kQuantizes = kActivationBits == 8;  // x, to int8

  struct Config : MatmulConfig {
    template <class Attributes>
    explicit Config(const Attributes& attributes)
        : MatmulConfig(attributes, kBits),
          stacked(MaybeGiven(attributes, "index")),
          grouped(MaybeGiven(attributes, "group_sizes")) {
      bias = MaybeGiven(attributes, "bias");
      residual = MaybeGiven(attributes, "residual");
      if (attributes.contains("clamps")) ReadClamp(attributes, *this);
      if (grouped && !stacked) {
        throw invalid_argument("attribute index must be 1 where group_sizes is, got 0");
      }
      // Nothing has asked for these; a bias would be one for each group.
      if (grouped && (rotation != 0 || bias || residual || clamps)) {
        throw invalid_argument("attributes rotation, bias, residual and clamps must be 0 where rows "
                               "come in groups");
      }
    }

    bool stacked, grouped;
  };

  template <class Call>
  explicit MatmulCall(const Call& call)
      : config(Checked(call)),
        x(call.Operand(0, "x")),
        buffer(call.Operand(1, "buffer")),
        y(call.Result(0, "y")) {
    x.NeedRank(2).NeedDtype({DType::F32, DType::BF16, DType::F16});
    x.NeedShape({x.shape[0], config.layout.k}, "rows and the attribute k");
    buffer.NeedRank(config.stacked ? 3 : 2).NeedDtype({DType::U8});
    y.NeedDtype({DType::F32, DType::BF16, DType::F16})
        .NeedShape({x.shape[0], config.n}, "the rows of x and the attribute n");
    int64_t next = 2;
    if (config.stacked) {
      const Array given = call.Operand(next++, "index");
      given.NeedDtype({DType::S32});
      index = static_cast<const int32_t*>(given.data);
      if (config.grouped) {
        const Array sizes = call.Operand(next++, "group_sizes");
        sizes.NeedRank(1).NeedDtype({DType::S32});
        given.NeedShape({sizes.shape[0]}, "that of group_sizes");
        group_sizes = static_cast<const int32_t*>(sizes.data);
        groups = sizes.shape[0];
      } else {
        given.NeedShape({}, "that of a scalar");
      }
    }
    if (config.rotation != 0) {
      const Array given = call.Operand(next++, "signs");
      given.NeedDtype({DType::S8}).NeedShape({config.layout.k}, "the attribute k");
      signs = static_cast<const int8_t*>(given.data);
    }
    if (config.scaled) {
      const Array given = call.Operand(next++, "x_scale");
      given.NeedDtype({DType::F32}).NeedShape({}, "that of a scalar");
      x_scale = static_cast<const float*>(given.data);
    }
    if (config.bias) {
      const Array given = call.Operand(next++, "bias");
      bias = given.NeedDtype({y.dtype}).NeedShape({config.n}, "the attribute n").data;
    }
    if (config.residual) {
      const Array given = call.Operand(next, "residual");
      residual = given.NeedDtype({y.dtype})
                     .NeedShape({y.shape[0], config.n}, "the rows of x and the attribute n")
                     .data;
    }
  }

  template <class Call>
  static Config Checked(const Call& call) {
    const Config config(call.attributes);
    call.NeedCounts(2 + config.stacked + config.grouped + (config.rotation != 0) + config.scaled +
                        config.bias + config.residual,
                    1);
    return config;
  }

  Config config;
  Array x, buffer, y;
  const int32_t* index = nullptr;        // of a stack: of its weight, or [groups]
  const int32_t* group_sizes = nullptr;  // [groups], where rows come in groups
  int64_t groups = 0;
  const int8_t* signs = nullptr;   // where x is rotated
  const float* x_scale = nullptr;  // where rows have a scale that is given
  const void *bias = nullptr, *residual = nullptr;  // of y's dtype, where they are added
};

}  // namespace jaxtap::ffi
