// Handlers of products of a few rows with packed weights: gemv_w8, gemv_w4 and gemm_w8a16.

#include "cuda/kernels/gemv.h"

#include "cuda/handlers/handler.h"
#include "ffi/attributes.h"
#include "ffi/product_call.h"
#include "te/modes.h"

namespace jaxtap::cuda {
namespace {

constexpr char kGemvW8[] = "te_ffi_kernels.gemv_w8";
constexpr char kGemvW4[] = "te_ffi_kernels.gemv_w4";
constexpr char kGemmW8A16[] = "te_ffi_kernels.gemm_w8a16";

template <int kBits>
ffi::ProductConfig ConfigOf(const xffi::Dictionary& attributes) {
  return {ffi::NeedAttribute<int64_t>(attributes, "k"), ffi::NeedAttribute<int64_t>(attributes, "n"),
          ffi::NeedAttribute<int64_t>(attributes, "group"), kBits};
}

template <int kBits>
void Check(const xffi::Dictionary& attributes) {
  ConfigOf<kBits>(attributes).Check();
}

template <int kBits>
void Body(const Call& call) {
  call.NeedCounts(2, 1);
  const ffi::ProductConfig config = ConfigOf<kBits>(call.attributes);
  const Array x = call.Operand(0, "x"), weight = call.Operand(1, "buffer");
  const Array y = call.Result(0, "y");
  ffi::ProductCall{x, weight, y}.Check(config);
  weight.NeedShape({panel_count(config.n), config.Check().panel_bytes()},
                   "panels of 16 columns and the bytes of one");
  Gemv args;
  args.x = x.data;
  args.x_dtype = te::float_of(x.dtype);
  args.m = x.shape[0];
  args.k = config.k;
  args.n = config.n;
  args.group = config.group;
  args.bits = kBits;
  args.weight = static_cast<const uint8_t*>(weight.data);
  args.y = y.data;
  args.y_dtype = te::float_of(y.dtype);
  gemv(args, call.stream);
}

const Handlers<kGemvW8, Check<8>, Body<8>> kOne;
const Handlers<kGemvW4, Check<4>, Body<4>> kTwo;
const Handlers<kGemmW8A16, Check<8>, Body<8>> kThree;

}  // namespace
}  // namespace jaxtap::cuda
