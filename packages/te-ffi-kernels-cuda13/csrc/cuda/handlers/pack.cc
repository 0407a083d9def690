// Handlers of packing: pack_w8 and pack_w4.

#include "cuda/handlers/handler.h"
#include "cuda/kernels/packed.h"
#include "ffi/pack_call.h"

namespace jaxtap::cuda {
namespace {

template <class Op>
void Run(const Op& given, const Call& call) {
  PackedPack args;
  args.qvalues = static_cast<const int8_t*>(given.qvalues.data);
  args.scales = given.scale.data;
  args.layout = given.layout;
  args.n = given.qvalues.shape[1];
  args.out = static_cast<uint8_t*>(given.buffer.data);
  packed_pack(args, call.stream);
}

template <class Op>
using Packing = Handlers<Op, Run<Op>>;

const Packing<ffi::PackCall<ffi::kPackW8, 8>> kPack8;
const Packing<ffi::PackCall<ffi::kPackW4, 4>> kPack4;

}  // namespace
}  // namespace jaxtap::cuda
