// Handlers of packing: pack_w8 and pack_w4.

#include "cuda/handlers/handler.h"
#include "cuda/kernels/packed.h"
#include "ffi/pack_call.h"

namespace jaxtap::cuda {
namespace {

constexpr char kPackW8[] = "te_ffi_kernels.pack_w8";
constexpr char kPackW4[] = "te_ffi_kernels.pack_w4";

template <int kBits>
void Check(const xffi::Dictionary& attributes) {
  ffi::PackConfigOf(attributes, kBits).Check();
}

template <int kBits>
void Body(const Call& call) {
  call.NeedCounts(2, 1);
  const ffi::PackConfig config = ffi::PackConfigOf(call.attributes, kBits);
  const Array codes = call.Operand(0, "codes"), scales = call.Operand(1, "scale");
  const Array out = call.Result(0, "buffer");
  ffi::PackCall{codes, scales, out}.Check(config);
  PackedPack args;
  args.codes = static_cast<const int8_t*>(codes.data);
  args.scales = static_cast<const float*>(scales.data);
  args.k = codes.shape[0];
  args.n = codes.shape[1];
  args.group = config.group;
  args.bits = kBits;
  args.out = static_cast<uint8_t*>(out.data);
  packed_pack(args, call.stream);
}

const Handlers<kPackW8, Check<8>, Body<8>> kOne;
const Handlers<kPackW4, Check<4>, Body<4>> kTwo;

}  // namespace
}  // namespace jaxtap::cuda
