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

inline constexpr char kGemmW8A8[] = "te_ffi_kernels.gemm_w8a8";
inline constexpr char kGemmW8A16[] = "te_ffi_kernels.gemm_w8a16";
inline constexpr char kGemvW8[] = "te_ffi_kernels.gemv_w8";
inline constexpr char kGemvW4[] = "te_ffi_kernels.gemv_w4";
inline constexpr char kGemmW4A8[] = "te_ffi_kernels.gemm_w4a8";
inline constexpr char kGemmW8A8Stack[] = "te_ffi_kernels.gemm_w8a8_stack";
inline constexpr char kGemmW8A16Stack[] = "te_ffi_kernels.gemm_w8a16_stack";
inline constexpr char kGemvW8Stack[] = "te_ffi_kernels.gemv_w8_stack";
inline constexpr char kGemvW4Stack[] = "te_ffi_kernels.gemv_w4_stack";
inline constexpr char kGemmW4A8Stack[] = "te_ffi_kernels.gemm_w4a8_stack";
inline constexpr char kGemmW8A8Added[] = "te_ffi_kernels.gemm_w8a8_added";
inline constexpr char kGemmW8A16Added[] = "te_ffi_kernels.gemm_w8a16_added";
inline constexpr char kGemvW8Added[] = "te_ffi_kernels.gemv_w8_added";
inline constexpr char kGemvW4Added[] = "te_ffi_kernels.gemv_w4_added";
inline constexpr char kGemmW4A8Added[] = "te_ffi_kernels.gemm_w4a8_added";
inline constexpr char kGemmW8A8StackAdded[] = "te_ffi_kernels.gemm_w8a8_stack_added";
inline constexpr char kGemmW8A16StackAdded[] = "te_ffi_kernels.gemm_w8a16_stack_added";
inline constexpr char kGemvW8StackAdded[] = "te_ffi_kernels.gemv_w8_stack_added";
inline constexpr char kGemvW4StackAdded[] = "te_ffi_kernels.gemv_w4_stack_added";
inline constexpr char kGemmW4A8StackAdded[] = "te_ffi_kernels.gemm_w4a8_stack_added";
inline constexpr char kGemmW8A8Groups[] = "te_ffi_kernels.gemm_w8a8_groups";
inline constexpr char kGemmW8A16Groups[] = "te_ffi_kernels.gemm_w8a16_groups";
inline constexpr char kGemvW8Groups[] = "te_ffi_kernels.gemv_w8_groups";
inline constexpr char kGemvW4Groups[] = "te_ffi_kernels.gemv_w4_groups";
inline constexpr char kGemmW4A8Groups[] = "te_ffi_kernels.gemm_w4a8_groups";

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

// A matmul of x[m, k] with one weight; operands after those say which where there are several, of
// `kOperands` in all but for signs and what is added to the result.
template <const char* kName, int kBits, int kOperands = 2, bool kAdded = false>
struct MatmulCall {
  static constexpr const char* kTarget = kName;
  static constexpr bool kStacked = kOperands > 2;   // an index says which weight of a stack
  static constexpr bool kGrouped = kOperands == 4;  // or one for each group of rows
  struct Config : MatmulConfig {
    template <class Attributes>
    explicit Config(const Attributes& attributes) : MatmulConfig(attributes, kBits) {
      if constexpr (kAdded) {
        bias = Given(attributes, "bias");
        residual = Given(attributes, "residual");
        ReadClamp(attributes, *this);
        if (bias || residual || clamps) return;
        throw invalid_argument("bias, residual or clamps must be 1, got 0 for all; where nothing is "
                               "added call the target without \"_added\"");
      }
    }
  };

  template <class Call>
  explicit MatmulCall(const Call& call)
      : config(Checked(call)),
        x(call.Operand(0, "x")),
        buffer(call.Operand(1, "buffer")),
        y(call.Result(0, "y")) {
    x.NeedRank(2).NeedDtype({DType::F32, DType::BF16, DType::F16});
    x.NeedShape({x.shape[0], config.layout.k}, "rows and the attribute k");
    buffer.NeedRank(kOperands == 2 ? 2 : 3).NeedDtype({DType::U8});
    y.NeedDtype({DType::F32, DType::BF16, DType::F16})
        .NeedShape({x.shape[0], config.n}, "the rows of x and the attribute n");
    int64_t next = kOperands;
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
    call.NeedCounts(
        kOperands + (config.rotation != 0) + config.scaled + config.bias + config.residual, 1);
    return config;
  }

  Config config;
  Array x, buffer, y;
  const int8_t* signs = nullptr;   // where x is rotated
  const float* x_scale = nullptr;  // where rows have a scale that is given
  const void *bias = nullptr, *residual = nullptr;  // of y's dtype, where they are added
};

// With one weight of a stack, read where it lies.
template <const char* kName, int kBits, bool kAdded = false>
struct StackCall : MatmulCall<kName, kBits, 3, kAdded> {
  template <class Call>
  explicit StackCall(const Call& call)
      : MatmulCall<kName, kBits, 3, kAdded>(call), index(call.Operand(2, "index")) {
    index.NeedDtype({DType::S32}).NeedShape({}, "that of a scalar");
  }

  Array index;
};

// Rows in groups, each with the weight of its index.
template <const char* kName, int kBits>
struct GroupsCall : MatmulCall<kName, kBits, 4> {
  template <class Call>
  explicit GroupsCall(const Call& call)
      : MatmulCall<kName, kBits, 4>(call),
        index(call.Operand(2, "index")),
        sizes(call.Operand(3, "group_sizes")) {
    if (this->signs != nullptr) {
      throw invalid_argument("attribute rotation must be 0 where rows come in groups");
    }
    sizes.NeedRank(1).NeedDtype({DType::S32});
    index.NeedDtype({DType::S32}).NeedShape({sizes.shape[0]}, "that of group_sizes");
  }

  Array index, sizes;
};

}  // namespace jaxtap::ffi
