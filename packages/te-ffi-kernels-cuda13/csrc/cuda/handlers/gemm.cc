// Handlers of gemm_v2: cuBLASLt's products, planned by `prepare`.

#include "cuda/gemm/handles.h"
#include "cuda/gemm/plan.h"
#include "cuda/handlers/planned.h"
#include "ffi/te_gemm_call.h"

namespace jaxtap::cuda {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.gemm_v2";

// What a call is given: read, and checked.
struct Product {
  explicit Product(const Call& call)
      : config(ffi::GemmConfig::V2(call.attributes)),
        given(Read(call)),
        args(given.Check(config)),
        workspace(call.Result(1, "workspace")) {
    workspace.NeedDtype({DType::U8});
    if (args.k == 0) throw invalid_argument("lhs is ", given.lhs.Text(), ": nothing is contracted");
  }

  static ffi::GemmCall Read(const Call& call) {
    call.NeedCounts(7, 2);
    return {call.Operand(0, "lhs"), call.Operand(1, "lhs_scale_inv"),
            call.Operand(2, "rhs"), call.Operand(3, "rhs_scale_inv"),
            call.Operand(4, "bias"), call.Operand(5, "alpha"),
            call.Operand(6, "beta"), call.Result(0, "output")};
  }

  bool empty() const { return args.m == 0 || args.n == 0; }

  ffi::GemmConfig config;
  ffi::GemmCall given;
  te::Gemm args;
  Array workspace;
};

void Check(const xffi::Dictionary& attributes) { ffi::GemmConfig::V2(attributes); }

// A plan, or nothing where there is nothing to compute.
struct Planned : Kept {
  std::unique_ptr<GemmPlan> plan;
};

std::unique_ptr<Planned> Make(const Call& call, int device) {
  const Product product(call);
  auto made = std::make_unique<Planned>();
  if (product.empty()) return made;
  GemmPlan::Options options;
  options.has_bias = product.given.bias.size() > 0;
  // As Transformer Engine has it.
  options.fast = !product.config.split_accumulator;
  options.workspace = static_cast<size_t>(product.workspace.size());
  CublasLt& lt = cublaslt();
  const LtHandle handle = lt_handles().of(lt, runtime(), device);
  made->plan = std::make_unique<GemmPlan>(lt, handle, product.args, options);
  return made;
}

void Body(const Call& call, Planned& planned) {
  const Product product(call);
  if (planned.plan == nullptr) return;
  GemmMemory memory;
  memory.alpha = static_cast<const float*>(product.given.alpha.data);
  memory.beta = static_cast<const float*>(product.given.beta.data);
  memory.workspace = product.workspace.data;
  memory.bytes = static_cast<size_t>(product.workspace.size());
  planned.plan->run(product.args, memory, call.stream);
}

const PlannedHandlers<kTarget, Check, Planned, Make, Body> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
