// Handlers of the products with packed weights, and of packing.

#include <cstring>

#include "common/isa.h"
#include "ffi/call.h"
#include "ffi/pack_call.h"
#include "ffi/product_call.h"
#include "matmul/matmul.h"
#include "matmul/pack.h"

namespace jaxtap::ffi {
namespace {

// `kPlanes`: of activations; 0 chooses by dtype.
//
// Picks the instruction set (for AMX, this asks the system for permission), checks the
// attributes, and runs the kernel once on next to nothing, so that its code is in memory.
template <int kBits, int kPlanes>
void WarmProduct(const Attributes& attributes) {
  const ProductConfig config = ProductConfigOf(attributes, kBits);
  const Isa isa = selected_isa();
  warm_panel_checks();
  config.Check();
  const int64_t k = 64, n = kPanelColumns;
  const PanelLayout layout = panel_layout(k, 0, config.bits);
  std::vector<int8_t> codes(k * n, 1);
  std::vector<float> scales(n, 1.0f), x(k, 1.0f), y(n);
  std::vector<uint8_t> buffer(layout.panel_bytes());
  const Parallel serial;
  pack(codes.data(), scales.data(), k, n, 0, config.bits, buffer.data(), 1, layout.panel_bytes(),
       serial);
  Matmul args;
  args.x = x.data();
  args.m = 1;
  args.weights = {buffer.data(), 1, layout.panel_bytes(), k, n, 0, config.bits};
  args.y = y.data();
  args.planes = kPlanes;
  matmul(args, serial, isa);
}

template <int kBits, int kPlanes>
void Multiply(const Call& call) {
  call.NeedCounts(2, 1);
  const ProductConfig config = ProductConfigOf(call.attributes, kBits);
  const Array in = call.Operand(0, "x"), weight = call.Operand(1, "buffer");
  const Array out = call.Result(0, "y");
  ProductCall{in, weight, out}.Check(config);
  XlaScheduler scheduler(call);
  Matmul args;
  args.x = in.data;
  args.x_dtype = in.dtype;
  args.m = in.shape[0];
  args.weights = {weight.data,  weight.shape[0], weight.shape[1], config.k,
                  config.n,     config.group,    config.bits};
  args.y = out.data;
  args.y_dtype = out.dtype;
  args.planes = kPlanes;
  matmul(args, Parallel(scheduler), selected_isa());
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
  PackCall{in, scales, out}.Check(config);
  XlaScheduler scheduler(call);
  pack(static_cast<const int8_t*>(in.data), static_cast<const float*>(scales.data), in.shape[0],
       in.shape[1], config.group, config.bits, static_cast<uint8_t*>(out.data), out.shape[0],
       out.shape[1], Parallel(scheduler));
}

constexpr char kGemmW8A8[] = "te_ffi_kernels.gemm_w8a8";
constexpr char kGemmW8A16[] = "te_ffi_kernels.gemm_w8a16";
constexpr char kGemvW8[] = "te_ffi_kernels.gemv_w8";
constexpr char kGemvW4[] = "te_ffi_kernels.gemv_w4";
constexpr char kPackW8[] = "te_ffi_kernels.pack_w8";
constexpr char kPackW4[] = "te_ffi_kernels.pack_w4";

template <const char* kTarget, int kBits, int kPlanes>
using Product = Handlers<kTarget, WarmProduct<kBits, kPlanes>, Multiply<kBits, kPlanes>>;
template <const char* kTarget, int kBits>
using Packing = Handlers<kTarget, CheckPack<kBits>, Pack<kBits>>;

const Product<kGemmW8A8, 8, 1> kOne;
const Product<kGemmW8A16, 8, 0> kTwo;
const Product<kGemvW8, 8, 0> kThree;
const Product<kGemvW4, 4, 0> kFour;
const Packing<kPackW8, 8> kFive;
const Packing<kPackW4, 4> kSix;

}  // namespace
}  // namespace jaxtap::ffi
