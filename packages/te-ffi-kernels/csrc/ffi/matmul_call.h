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
                            static_cast<int>(AttributeOr<int64_t>(attributes, "scale_bits", 32)))),
        rotation(AttributeOr<int64_t>(attributes, "rotation", 0)) {
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
  int64_t rotation;  // the block in which rows of x are rotated by signs, the last operand; or 0
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
inline constexpr char kGemmW8A8Groups[] = "te_ffi_kernels.gemm_w8a8_groups";
inline constexpr char kGemmW8A16Groups[] = "te_ffi_kernels.gemm_w8a16_groups";
inline constexpr char kGemvW8Groups[] = "te_ffi_kernels.gemv_w8_groups";
inline constexpr char kGemvW4Groups[] = "te_ffi_kernels.gemv_w4_groups";
inline constexpr char kGemmW4A8Groups[] = "te_ffi_kernels.gemm_w4a8_groups";

// A matmul of x[m, k] with one weight; operands after those say which where there are several, of
// `kOperands` in all but for signs.
template <const char* kName, int kBits, int kOperands = 2>
struct MatmulCall {
  static constexpr const char* kTarget = kName;
  static constexpr bool kStacked = kOperands > 2;   // an index says which weight of a stack
  static constexpr bool kGrouped = kOperands == 4;  // or one for each group of rows
  struct Config : MatmulConfig {
    template <class Attributes>
    explicit Config(const Attributes& attributes) : MatmulConfig(attributes, kBits) {}
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
    if (config.rotation == 0) return;
    const Array given = call.Operand(kOperands, "signs");
    given.NeedDtype({DType::S8}).NeedShape({config.layout.k}, "the attribute k");
    signs = static_cast<const int8_t*>(given.data);
  }

  template <class Call>
  static Config Checked(const Call& call) {
    const Config config(call.attributes);
    call.NeedCounts(kOperands + (config.rotation != 0), 1);
    return config;
  }

  Config config;
  Array x, buffer, y;
  const int8_t* signs = nullptr;  // where x is rotated
};

// With one weight of a stack, read where it lies.
template <const char* kName, int kBits>
struct StackCall : MatmulCall<kName, kBits, 3> {
  template <class Call>
  explicit StackCall(const Call& call)
      : MatmulCall<kName, kBits, 3>(call), index(call.Operand(2, "index")) {
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
