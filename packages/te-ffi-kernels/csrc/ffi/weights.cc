// Handlers of the products with packed weights, and of packing.

#include <cstring>

#include "common/isa.h"
#include "ffi/pack_call.h"
#include "ffi/product_call.h"
#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/threads.h"
#include "matmul/matmul.h"
#include "matmul/pack.h"

namespace jaxtap::ffi {
namespace {

struct Config : ProductConfig {
  int planes;
};

// Picks the instruction set (for AMX, this asks the system for permission), checks the
// attributes, and runs the kernel once on next to nothing, so that its code is in memory.
void Warm(const Config& config) {
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
  args.planes = config.planes;
  matmul(args, serial, isa);
}

void Execute(const Config& config, xffi::ThreadPool pool, xffi::AnyBuffer x, xffi::AnyBuffer buffer,
             xffi::Result<xffi::AnyBuffer> y) {
  const Array in = Read("x", x), weight = Read("buffer", buffer), out = Read("y", y);
  ProductCall{in, weight, out}.Check(config);
  XlaScheduler scheduler(pool);
  Matmul args;
  args.x = in.data;
  args.x_dtype = in.dtype;
  args.m = in.shape[0];
  args.weights = {weight.data,  weight.shape[0], weight.shape[1], config.k,
                  config.n,     config.group,    config.bits};
  args.y = out.data;
  args.y_dtype = out.dtype;
  args.planes = config.planes;
  matmul(args, Parallel(scheduler), selected_isa());
}

void ExecutePack(const PackConfig& config, xffi::ThreadPool pool, xffi::AnyBuffer codes,
                 xffi::AnyBuffer scale, xffi::Result<xffi::AnyBuffer> buffer) {
  const Array in = Read("codes", codes), scales = Read("scale", scale);
  const Array out = Read("buffer", buffer);
  PackCall{in, scales, out}.Check(config);
  XlaScheduler scheduler(pool);
  pack(static_cast<const int8_t*>(in.data), static_cast<const float*>(scales.data), in.shape[0],
       in.shape[1], config.group, config.bits, static_cast<uint8_t*>(out.data), out.shape[0],
       out.shape[1], Parallel(scheduler));
}

// A product with weights of `bits`, and activations in `planes` planes (0: chosen by dtype).
#define JAXTAP_PRODUCT(Name, target, bits, planes)                                            \
  XLA_FFI_DEFINE_HANDLER(                                                                     \
      k##Name##Instantiate,                                                                   \
      [](int64_t k, int64_t n, int64_t group) {                                               \
        return Warmed(target, [&] { Warm({{k, n, group, bits}, planes}); });                  \
      },                                                                                      \
      xffi::Ffi::BindInstantiate().Attr<int64_t>("k").Attr<int64_t>("n").Attr<int64_t>(       \
          "group"));                                                                          \
  XLA_FFI_DEFINE_HANDLER(                                                                     \
      k##Name##Execute,                                                                       \
      [](xffi::ThreadPool pool, xffi::AnyBuffer x, xffi::AnyBuffer buffer,                    \
         xffi::Result<xffi::AnyBuffer> y, int64_t k, int64_t n, int64_t group) {              \
        return Guarded(target, [&] {                                                          \
          Execute({{k, n, group, bits}, planes}, pool, x, buffer, y);                         \
        });                                                                                   \
      },                                                                                      \
      xffi::Ffi::Bind()                                                                       \
          .Ctx<xffi::ThreadPool>()                                                            \
          .Arg<xffi::AnyBuffer>()                                                             \
          .Arg<xffi::AnyBuffer>()                                                             \
          .Ret<xffi::AnyBuffer>()                                                             \
          .Attr<int64_t>("k")                                                                 \
          .Attr<int64_t>("n")                                                                 \
          .Attr<int64_t>("group"));                                                           \
  const Registration k##Name##Registration({target, k##Name##Instantiate, k##Name##Execute});

#define JAXTAP_PACK(Name, target, bits)                                                       \
  XLA_FFI_DEFINE_HANDLER(                                                                     \
      k##Name##Instantiate,                                                                   \
      [](int64_t group) { return Warmed(target, [&] { PackConfig{group, bits}.Check(); }); }, \
      xffi::Ffi::BindInstantiate().Attr<int64_t>("group"));                                   \
  XLA_FFI_DEFINE_HANDLER(                                                                     \
      k##Name##Execute,                                                                       \
      [](xffi::ThreadPool pool, xffi::AnyBuffer codes, xffi::AnyBuffer scale,                 \
         xffi::Result<xffi::AnyBuffer> buffer, int64_t group) {                               \
        return Guarded(target,                                                                \
                       [&] { ExecutePack({group, bits}, pool, codes, scale, buffer); });      \
      },                                                                                      \
      xffi::Ffi::Bind()                                                                       \
          .Ctx<xffi::ThreadPool>()                                                            \
          .Arg<xffi::AnyBuffer>()                                                             \
          .Arg<xffi::AnyBuffer>()                                                             \
          .Ret<xffi::AnyBuffer>()                                                             \
          .Attr<int64_t>("group"));                                                           \
  const Registration k##Name##Registration({target, k##Name##Instantiate, k##Name##Execute});

JAXTAP_PRODUCT(GemmW8A8, "te_ffi_kernels.gemm_w8a8", 8, 1)
JAXTAP_PRODUCT(GemmW8A16, "te_ffi_kernels.gemm_w8a16", 8, 0)
JAXTAP_PRODUCT(GemvW8, "te_ffi_kernels.gemv_w8", 8, 0)
JAXTAP_PRODUCT(GemvW4, "te_ffi_kernels.gemv_w4", 4, 0)
JAXTAP_PACK(PackW8, "te_ffi_kernels.pack_w8", 8)
JAXTAP_PACK(PackW4, "te_ffi_kernels.pack_w4", 4)

}  // namespace
}  // namespace jaxtap::ffi
