// The Python module te_ffi_kernels_cuda13._native.

#include "ffi/python.h"
// After it, as Python wants it.
#include <cuda_runtime_api.h>

#include "cuda/attention/steps.h"
#include "cuda/cublaslt.h"
#include "cuda/cudnn.h"
#include "cuda/gemm/packed.h"
#include "cuda/gemm/steps.h"
#include "cuda/handlers/attention.h"
#include "cuda/handlers/handler.h"
#include "cuda/kernels/grouped.h"
#include "cuda/kernels/router.h"

namespace python = jaxtap::python;

namespace jaxtap::cuda {

xffi::TypeId SiteState::id = {};

namespace {

xffi::TypeInfo kSiteInfo = xffi::MakeTypeInfo<SiteState>();

using python::Capsule;

// {target: stages}
python::Dict TargetTable() {
  python::Dict table;
  for (const Target& target : Targets()) {
    python::Dict stages;
    stages.set("instantiate", Capsule(target.instantiate));
    if (target.prepare != nullptr) stages.set("prepare", Capsule(target.prepare));
    stages.set("initialize", Capsule(target.initialize));
    stages.set("execute", Capsule(target.execute));
    table.set(target.name, std::move(stages));
  }
  return table;
}

// {name: capsules}
python::Dict TypeTable() {
  python::Dict site;
  site.set("type_id", Capsule(static_cast<void*>(&SiteState::id)));
  site.set("type_info", Capsule(static_cast<void*>(&kSiteInfo)));
  python::Dict table;
  table.set("te_ffi_kernels_cuda13.Site", std::move(site));
  return table;
}

// What the installed driver supports, as 13000 for 13.0; 0 where there is none.
int DriverVersion() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return version;
}

// The least of the devices', as 90 for 9.0; 0 where there is none.
int ComputeCapability() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  int least = 0;
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const int found = 10 * major + minor;
    least = device == 0 || found < least ? found : least;
  }
  return least;
}

// (version, what went wrong), of which one is 0 or empty.
template <size_t (*kLoad)(const std::string&, std::string*)>
python::Object LoadLibrary(const std::string& path) {
  std::string error;
  const size_t version = kLoad(path, &error);
  return python::Tuple(version, error);
}

// The workspace that the kernels of a product need beside cuBLASLt's own.
size_t GemmWorkspace(int64_t m, int64_t n, int64_t k, int64_t scaling, bool int8, bool lhs_first,
                     bool rhs_first, int64_t dtype, int64_t out, bool bias, bool gelu) {
  te::Gemm args;
  args.m = m;
  args.n = n;
  args.k = k;
  args.scaling = te::scaling_of(scaling);
  constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};
  args.lhs.dtype = int8                               ? DType::S8
                   : args.scaling == te::Scaling::kNone ? kFloats[dtype]
                                                        : DType::F8E4M3FN;
  args.rhs.dtype = args.lhs.dtype;
  args.lhs.lanes_first = lhs_first;
  args.rhs.lanes_first = rhs_first;
  args.out_dtype = static_cast<te::Float>(out);
  args.gelu = gelu;
  return GemmSteps(args, bias).bytes;
}

// The same of a product with a packed weight. Floats are numbered as kFloats above.
size_t PackedWorkspace(int64_t m, int64_t k, int64_t n, int64_t group, int bits, bool quantizes,
                       int64_t dtype, int64_t out) {
  PackedProduct args;
  args.x_dtype = static_cast<te::Float>(dtype);
  args.m = m;
  args.n = n;
  args.layout = panel_layout(k, group, bits);
  args.quantizes = quantizes;
  args.y_dtype = static_cast<te::Float>(out);
  return PackedSteps(args).bytes;
}

AttentionSteps StepsOf(PyObject* attributes, bool bfloat16, bool backward) {
  const ffi::AttentionConfig config(python::Items{attributes});
  return AttentionSteps(config, bfloat16 ? DType::BF16 : DType::F16, backward);
}

// The workspace that the kernels of attention need beside cuDNN's own.
size_t AttentionWorkspace(PyObject* attributes, bool backward) {
  return StepsOf(attributes, true, backward).bytes;
}

// (cuDNN's workspace on a device, why cuDNN doesn't have this attention), the second empty where it
// does. The plan is kept for the handlers.
python::Object PlanAttention(PyObject* attributes, bool bfloat16, bool backward, int device) {
  const AttentionSteps steps = StepsOf(attributes, bfloat16, backward);
  const DnnPlans::Entry* entry = nullptr;
  {
    python::OthersRun others_run;
    entry = &AttentionPlans().of(cudnn(), runtime(), device, steps.graph);
  }
  return python::Tuple(entry->workspace, entry->why);
}

PyMethodDef methods[] = {python::Method<TargetTable>("targets"),
                         python::Method<TypeTable>("types"),
                         python::Method<ffi::WarmCounts>("warm_counts"),
                         python::Method<ComputeCapability>("compute_capability"),
                         python::Method<LoadLibrary<load_cublaslt>>("load_cublaslt"),
                         python::Method<LoadLibrary<load_cudnn>>("load_cudnn"),
                         python::Method<AttentionWorkspace>("attention_workspace"),
                         python::Method<PlanAttention>("plan_attention"),
                         python::Method<GemmWorkspace>("gemm_workspace"),
                         python::Method<PackedWorkspace>("packed_workspace"),
                         python::Method<DriverVersion>("driver_version"),
                         {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1,     methods,
                          nullptr,               nullptr,   nullptr, nullptr};

}  // namespace
}  // namespace jaxtap::cuda

PyMODINIT_FUNC PyInit__native() {
  return python::Guarded([] {
    python::Object module(PyModule_Create(&jaxtap::cuda::definition));
    python::SetAttribute(module, "API_VERSION",
                         python::Tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR));
    python::SetAttribute(module, "CUDA_VERSION", CUDART_VERSION);
    python::SetAttribute(module, "LOSS_PART", jaxtap::cuda::kLossPart);
    python::SetAttribute(module, "GROUP_START", sizeof(jaxtap::cuda::GroupStart));
    return module;
  });
}
