// Handlers of the products with packed weights, and of packing.

#include <cstring>

#include "common/isa.h"
#include "ffi/call.h"
#include "ffi/pack_call.h"
#include "ffi/product_call.h"
#include "matmul/matmul.h"
#include "matmul/pack.h"
#include "matmul/take.h"

namespace jaxtap::ffi {
namespace {

// Runs the kernel once on next to nothing, so that its code is in memory.
void MultiplyOnce(const PanelLayout& layout, int planes, Isa isa) {
  const int64_t k = layout.k, n = layout.columns();
  std::vector<int8_t> codes(k * n, 1);
  std::vector<uint8_t> scales(layout.scale_bytes(), 0), buffer(layout.panel_bytes());
  std::vector<float> x(k, 1.0f), y(n);
  const Parallel serial;
  pack(codes.data(), scales.data(), n, layout, buffer.data(), 1, layout.panel_bytes(), serial);
  Matmul args;
  args.x = x.data();
  args.m = 1;
  args.weights = {buffer.data(), 1, layout.panel_bytes(), n, layout};
  args.y = y.data();
  args.planes = planes;
  matmul(args, serial, isa);
}

// `kPlanes`: of activations; 0 chooses by dtype.
//
// Picks the instruction set (for AMX, this asks the system for permission), and checks the
// attributes.
template <int kBits, int kPlanes>
void WarmProduct(const Attributes& attributes) {
  const ProductConfig config = ProductConfigOf(attributes, kBits);
  const Isa isa = selected_isa();
  warm_panel_checks();
  PanelLayout layout = config.Check();
  layout.k = 64;
  layout.group = 0;
  MultiplyOnce(layout, kPlanes, isa);
}

template <int kBits, int kPlanes>
void MultiplyWith(const Call& call, const Array& weight, const uint8_t* buffer,
                  const ProductConfig& config) {
  const Array in = call.Operand(0, "x"), out = call.Result(0, "y");
  ProductCall{in, weight, out}.Check(config);
  XlaScheduler scheduler(call);
  Matmul args;
  args.x = in.data;
  args.x_dtype = in.dtype;
  args.m = in.shape[0];
  const int64_t axis = weight.rank() - 2;
  args.weights = {buffer, weight.shape[axis], weight.shape[axis + 1], config.n, config.Check()};
  args.y = out.data;
  args.y_dtype = out.dtype;
  args.planes = kPlanes;
  matmul(args, Parallel(scheduler), selected_isa());
}

template <int kBits, int kPlanes>
void Multiply(const Call& call) {
  call.NeedCounts(2, 1);
  const Array weight = call.Operand(1, "buffer");
  weight.NeedRank(2);
  MultiplyWith<kBits, kPlanes>(call, weight, static_cast<const uint8_t*>(weight.data),
                               ProductConfigOf(call.attributes, kBits));
}

// With one weight of a stack, read where it lies.
template <int kBits, int kPlanes>
void MultiplyStack(const Call& call) {
  call.NeedCounts(3, 1);
  const Array stack = call.Operand(1, "buffer"), index = call.Operand(2, "index");
  stack.NeedRank(3);
  index.NeedDtype({DType::S32}).NeedShape({}, "that of a scalar");
  const int32_t place = *static_cast<const int32_t*>(index.data);
  MultiplyWith<kBits, kPlanes>(call, stack, OneOfStack(stack, place),
                               ProductConfigOf(call.attributes, kBits));
}

template <int kBits>
void CheckPack(const Attributes& attributes) {
  PackConfigOf(attributes, kBits).Check();
}

template <int kBits>
void Pack(const Call& call) {
  call.NeedCounts(2, 1);
  const PackConfig config = PackConfigOf(call.attributes, kBits);
  const Array in = call.Operand(0, "codes"), scales = call.Operand(1, "scale");
  const Array out = call.Result(0, "buffer");
  const PanelLayout layout = PackCall{in, scales, out}.Check(config);
  XlaScheduler scheduler(call);
  pack(static_cast<const int8_t*>(in.data), scales.data, in.shape[1], layout,
       static_cast<uint8_t*>(out.data), out.shape[0], out.shape[1], Parallel(scheduler));
}

// Rows in groups, each with the weight of its index. Rows beyond the last group give zeros.
template <int kBits, int kPlanes>
void MultiplyGroups(const Call& call) {
  call.NeedCounts(4, 1);
  const ProductConfig config = ProductConfigOf(call.attributes, kBits);
  const Array in = call.Operand(0, "x"), stack = call.Operand(1, "buffer");
  const Array index = call.Operand(2, "index"), sizes = call.Operand(3, "group_sizes");
  const Array out = call.Result(0, "y");
  ProductCall{in, stack, out}.Check(config);
  stack.NeedRank(3);
  sizes.NeedRank(1).NeedDtype({DType::S32});
  index.NeedDtype({DType::S32}).NeedShape({sizes.shape[0]}, "that of group_sizes");
  const std::vector<int64_t> ends = EndsOfGroups(sizes, in.shape[0]);
  const int64_t x_row = config.k * static_cast<int64_t>(byte_size(in.dtype));
  const int64_t y_row = config.n * static_cast<int64_t>(byte_size(out.dtype));
  XlaScheduler scheduler(call);
  const Parallel parallel(scheduler);
  const Isa isa = selected_isa();
  const uint8_t* x = static_cast<const uint8_t*>(in.data);
  uint8_t* y = static_cast<uint8_t*>(out.data);
  Matmul args;
  args.x_dtype = in.dtype;
  args.y_dtype = out.dtype;
  args.planes = kPlanes;
  int64_t begin = 0;
  for (size_t group = 0; group < ends.size(); ++group) {
    args.m = ends[group] - begin;
    if (args.m > 0) {
      args.x = x + begin * x_row;
      args.y = y + begin * y_row;
      const int32_t place = static_cast<const int32_t*>(index.data)[group];
      args.weights = {OneOfStack(stack, place), stack.shape[1], stack.shape[2], config.n,
                      config.Check()};
      matmul(args, parallel, isa);
    }
    begin = ends[group];
  }
  std::memset(y + begin * y_row, 0, static_cast<size_t>((in.shape[0] - begin) * y_row));
}

ProductConfig TakeConfigOf(const Attributes& attributes) {
  return ProductConfigOf(attributes, static_cast<int>(NeedAttribute<int64_t>(attributes, "bits")));
}

void WarmTake(const Attributes& attributes) {
  TakeConfigOf(attributes).Check();
  warm_panel_checks();
}

void TakeOf(const Call& call) {
  call.NeedCounts(2, 1);
  const ProductConfig config = TakeConfigOf(call.attributes);
  const Array weight = call.Operand(0, "buffer"), indices = call.Operand(1, "indices");
  const Array out = call.Result(0, "taken");
  Take args;
  args.columns = NeedAttribute<int64_t>(call.attributes, "axis") == 1;
  weight.NeedRank(2).NeedDtype({DType::U8});
  indices.NeedRank(1).NeedDtype({DType::S32});
  out.NeedDtype({DType::F32, DType::BF16, DType::F16})
      .NeedShape({indices.shape[0], args.columns ? config.k : config.n},
                 "the indices and the other axis of the weight");
  args.weights = {weight.data, weight.shape[0], weight.shape[1], config.n, config.Check()};
  args.indices = static_cast<const int32_t*>(indices.data);
  args.count = indices.shape[0];
  args.out = out.data;
  args.dtype = out.dtype;
  XlaScheduler scheduler(call);
  take(args, Parallel(scheduler));
}

constexpr char kGemmW8A8[] = "te_ffi_kernels.gemm_w8a8";
constexpr char kGemmW8A16[] = "te_ffi_kernels.gemm_w8a16";
constexpr char kGemvW8[] = "te_ffi_kernels.gemv_w8";
constexpr char kGemvW4[] = "te_ffi_kernels.gemv_w4";
constexpr char kGemmW4A8[] = "te_ffi_kernels.gemm_w4a8";
constexpr char kGemmW8A8Stack[] = "te_ffi_kernels.gemm_w8a8_stack";
constexpr char kGemmW8A16Stack[] = "te_ffi_kernels.gemm_w8a16_stack";
constexpr char kGemvW8Stack[] = "te_ffi_kernels.gemv_w8_stack";
constexpr char kGemvW4Stack[] = "te_ffi_kernels.gemv_w4_stack";
constexpr char kGemmW4A8Stack[] = "te_ffi_kernels.gemm_w4a8_stack";
constexpr char kGemmW8A8Groups[] = "te_ffi_kernels.gemm_w8a8_groups";
constexpr char kGemmW8A16Groups[] = "te_ffi_kernels.gemm_w8a16_groups";
constexpr char kGemvW8Groups[] = "te_ffi_kernels.gemv_w8_groups";
constexpr char kGemvW4Groups[] = "te_ffi_kernels.gemv_w4_groups";
constexpr char kGemmW4A8Groups[] = "te_ffi_kernels.gemm_w4a8_groups";
constexpr char kPackW8[] = "te_ffi_kernels.pack_w8";
constexpr char kPackW4[] = "te_ffi_kernels.pack_w4";
constexpr char kPackedTake[] = "te_ffi_kernels.packed_take";

template <const char* kTarget, const char* kStackTarget, const char* kGroupsTarget, int kBits,
          int kPlanes>
struct Product {
  Handlers<kTarget, WarmProduct<kBits, kPlanes>, Multiply<kBits, kPlanes>> one;
  Handlers<kStackTarget, WarmProduct<kBits, kPlanes>, MultiplyStack<kBits, kPlanes>> stack;
  Handlers<kGroupsTarget, WarmProduct<kBits, kPlanes>, MultiplyGroups<kBits, kPlanes>> groups;
};
template <const char* kTarget, int kBits>
using Packing = Handlers<kTarget, CheckPack<kBits>, Pack<kBits>>;

const Product<kGemmW8A8, kGemmW8A8Stack, kGemmW8A8Groups, 8, 1> kOne;
const Product<kGemmW8A16, kGemmW8A16Stack, kGemmW8A16Groups, 8, 0> kTwo;
const Product<kGemvW8, kGemvW8Stack, kGemvW8Groups, 8, 0> kThree;
const Product<kGemvW4, kGemvW4Stack, kGemvW4Groups, 4, 0> kFour;
const Product<kGemmW4A8, kGemmW4A8Stack, kGemmW4A8Groups, 4, 1> kEight;
const Packing<kPackW8, 8> kFive;
const Packing<kPackW4, 4> kSix;
const Handlers<kPackedTake, WarmTake, TakeOf> kSeven;

}  // namespace
}  // namespace jaxtap::ffi
