// Handlers of matmuls with packed weights. Where the weight lies in a stack kernels read on the
// device.

#include "cuda/gemm/handles.h"
#include "cuda/gemm/packed.h"
#include "cuda/handlers/planned.h"
#include "ffi/matmul_call.h"
#include "ffi/stack.h"
#include "te/modes.h"

namespace jaxtap::cuda {
namespace {

template <class Op>
PackedMatmul MatmulOf(const Op& given) {
  const typename Op::Config& config = given.config;
  if (config.rotation != 0 || config.scaled || config.bias || config.residual || config.clamps) {
    throw invalid_argument("attributes rotation, x_scale, bias, residual and clamps must be 0 on "
                           "GPUs");
  }
  const PanelLayout& layout = config.layout;
  const int64_t panels = panel_count(config.n, layout.columns());
  PackedMatmul args;
  args.x = given.x.data;
  args.x_dtype = te::float_of(given.x.dtype);
  args.m = given.x.shape[0];
  args.n = config.n;
  args.layout = layout;
  args.quantizes = Op::kQuantizes;
  args.weight = static_cast<const uint8_t*>(given.buffer.data);
  args.y = given.y.data;
  args.y_dtype = te::float_of(given.y.dtype);
  if (config.stacked) {
    ffi::NeedStack(given.buffer);
    given.buffer.NeedShape({given.buffer.shape[0], panels, layout.panel_bytes()},
                           "weights, the panels of one, and the bytes of one");
    args.stack = {given.index, given.buffer.shape[0], panels * layout.panel_bytes()};
  } else {
    given.buffer.NeedShape({panels, layout.panel_bytes()}, "panels and the bytes of one");
  }
  if (config.grouped) {
    args.sizes = given.group_sizes;
    args.row_groups = given.groups;
  }
  return args;
}

// A plan, or nothing where cuBLASLt has no part.
struct Planned : PerDevice {
  std::unique_ptr<PackedSums> sums;
};

template <class Op>
std::unique_ptr<Planned> Make(const Op& given, const Call& call, int device) {
  const PackedMatmul args = MatmulOf(given);
  const PackedWorkspace steps(args);
  auto made = std::make_unique<Planned>();
  if (steps.empty || !steps.library) return made;
  CublasLt& lt = cublaslt();
  const LtHandle handle = lt_handles().of(lt, runtime(), device);
  made->sums = std::make_unique<PackedSums>(lt, handle, args,
                                            static_cast<size_t>(call.Memory().size()));
  return made;
}

template <class Op>
void Run(const Op& given, const Call& call, Planned& planned) {
  const Array workspace = call.Memory();
  packed_matmul(MatmulOf(given), planned.sums.get(), workspace.data,
                static_cast<size_t>(workspace.size()), call.stream);
}

template <const char* kName, int kBits, int kActivationBits,
          class Op = ffi::MatmulCall<kName, kBits, kActivationBits>>
using MatmulHandlers = PlannedHandlers<Op, Planned, Make<Op>, Run<Op>>;

const MatmulHandlers<ffi::kGemmW8A8, 8, 8> kW8A8;
const MatmulHandlers<ffi::kGemmW8A16, 8, 16> kW8A16;
const MatmulHandlers<ffi::kGemmW4A8, 4, 8> kW4A8;
const MatmulHandlers<ffi::kGemmW4A16, 4, 16> kW4A16;

}  // namespace
}  // namespace jaxtap::cuda
