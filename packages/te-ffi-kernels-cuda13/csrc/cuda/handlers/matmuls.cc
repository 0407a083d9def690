// Handlers of matmuls with packed weights: gemm_w8a8, gemm_w4a8, gemm_w8a16, gemv_w8 and gemv_w4.

#include "cuda/gemm/handles.h"
#include "cuda/gemm/packed.h"
#include "cuda/handlers/planned.h"
#include "ffi/matmul_call.h"
#include "te/modes.h"

namespace jaxtap::cuda {
namespace {

template <class Op, bool kQuantizes>
PackedMatmul MatmulOf(const Op& given) {
  if (given.config.rotation != 0) throw invalid_argument("attribute rotation must be 0 on GPUs");
  const PanelLayout& layout = given.config.layout;
  given.buffer.NeedShape({panel_count(given.config.n, layout.columns()), layout.panel_bytes()},
                         "panels and the bytes of one");
  PackedMatmul args;
  args.x = given.x.data;
  args.x_dtype = te::float_of(given.x.dtype);
  args.m = given.x.shape[0];
  args.n = given.config.n;
  args.layout = layout;
  args.quantizes = kQuantizes;
  args.weight = static_cast<const uint8_t*>(given.buffer.data);
  args.y = given.y.data;
  args.y_dtype = te::float_of(given.y.dtype);
  return args;
}

// A plan, or nothing where cuBLASLt has no part.
struct Planned : Kept {
  std::unique_ptr<PackedSums> sums;
};

template <class Op, bool kQuantizes>
std::unique_ptr<Planned> Make(const Op& given, const Call& call, int device) {
  const PackedMatmul args = MatmulOf<Op, kQuantizes>(given);
  const PackedSteps steps(args);
  auto made = std::make_unique<Planned>();
  if (steps.empty || !steps.library) return made;
  CublasLt& lt = cublaslt();
  const LtHandle handle = lt_handles().of(lt, runtime(), device);
  made->sums = std::make_unique<PackedSums>(lt, handle, args,
                                            static_cast<size_t>(call.Memory().size()));
  return made;
}

template <class Op, bool kQuantizes>
void Run(const Op& given, const Call& call, Planned& planned) {
  const Array workspace = call.Memory();
  packed_matmul(MatmulOf<Op, kQuantizes>(given), planned.sums.get(), workspace.data,
                 static_cast<size_t>(workspace.size()), call.stream);
}

template <class Op, bool kQuantizes = false>
using MatmulHandlers = PlannedHandlers<Op, Planned, Make<Op, kQuantizes>, Run<Op, kQuantizes>>;

const MatmulHandlers<ffi::MatmulCall<ffi::kGemmW8A8, 8>, true> kW8A8;
const MatmulHandlers<ffi::MatmulCall<ffi::kGemmW4A8, 4>, true> kW4A8;
const MatmulHandlers<ffi::MatmulCall<ffi::kGemmW8A16, 8>> kW8A16;
const MatmulHandlers<ffi::MatmulCall<ffi::kGemvW8, 8>> kW8;
const MatmulHandlers<ffi::MatmulCall<ffi::kGemvW4, 4>> kW4;

}  // namespace
}  // namespace jaxtap::cuda
