// Handlers of matmuls with packed weights: gemm_w8a8, gemm_w4a8, gemm_w8a16, gemv_w8 and gemv_w4;
// with one weight, with one of a stack, and with one for each group of rows. Where the weight lies in
// a stack kernels read on the device.

#include "cuda/gemm/handles.h"
#include "cuda/gemm/packed.h"
#include "cuda/handlers/planned.h"
#include "ffi/matmul_call.h"
#include "ffi/stack.h"
#include "te/modes.h"

namespace jaxtap::cuda {
namespace {

template <class Op, bool kQuantizes>
PackedMatmul MatmulOf(const Op& given) {
  if (given.config.rotation != 0) throw invalid_argument("attribute rotation must be 0 on GPUs");
  if (given.config.scaled) throw invalid_argument("attribute x_scale must be 0 on GPUs");
  const PanelLayout& layout = given.config.layout;
  const int64_t panels = panel_count(given.config.n, layout.columns());
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
  if constexpr (Op::kStacked) {
    ffi::NeedStack(given.buffer);
    given.buffer.NeedShape({given.buffer.shape[0], panels, layout.panel_bytes()},
                           "weights, the panels of one, and the bytes of one");
    args.stack = {static_cast<const int32_t*>(given.index.data), given.buffer.shape[0],
                  panels * layout.panel_bytes()};
  } else {
    given.buffer.NeedShape({panels, layout.panel_bytes()}, "panels and the bytes of one");
  }
  if constexpr (Op::kGrouped) {
    args.sizes = static_cast<const int32_t*>(given.sizes.data);
    args.row_groups = given.sizes.shape[0];
  }
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

template <class Op, bool kQuantizes>
using PlannedMatmul = PlannedHandlers<Op, Planned, Make<Op, kQuantizes>, Run<Op, kQuantizes>>;

template <const char* kOne, const char* kStack, const char* kGroups, int kBits,
          bool kQuantizes = false>
struct MatmulHandlers {
  PlannedMatmul<ffi::MatmulCall<kOne, kBits>, kQuantizes> one;
  PlannedMatmul<ffi::StackCall<kStack, kBits>, kQuantizes> stack;
  PlannedMatmul<ffi::GroupsCall<kGroups, kBits>, kQuantizes> groups;
};

const MatmulHandlers<ffi::kGemmW8A8, ffi::kGemmW8A8Stack, ffi::kGemmW8A8Groups, 8, true> kW8A8;
const MatmulHandlers<ffi::kGemmW4A8, ffi::kGemmW4A8Stack, ffi::kGemmW4A8Groups, 4, true> kW4A8;
const MatmulHandlers<ffi::kGemmW8A16, ffi::kGemmW8A16Stack, ffi::kGemmW8A16Groups, 8> kW8A16;
const MatmulHandlers<ffi::kGemvW8, ffi::kGemvW8Stack, ffi::kGemvW8Groups, 8> kW8;
const MatmulHandlers<ffi::kGemvW4, ffi::kGemvW4Stack, ffi::kGemvW4Groups, 4> kW4;

}  // namespace
}  // namespace jaxtap::cuda
