// The Python module te_ffi_kernels_cuda13._native.

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "cuda/attention/steps.h"
#include "cuda/cublaslt.h"
#include "cuda/cudnn.h"
#include "cuda/gemm/packed.h"
#include "cuda/gemm/steps.h"
#include "cuda/handlers/attention.h"
#include "cuda/handlers/handler.h"
#include "cuda/kernels/grouped.h"
#include "cuda/kernels/router.h"

namespace nb = nanobind;

namespace jaxtap::cuda {

xffi::TypeId SiteState::id = {};

namespace {

xffi::TypeInfo kSiteInfo = xffi::MakeTypeInfo<SiteState>();

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// {target: stages}
nb::dict TargetTable() {
  nb::dict table;
  for (const Target& target : Targets()) {
    nb::dict stages;
    stages["instantiate"] = Capsule(target.instantiate);
    if (target.prepare != nullptr) stages["prepare"] = Capsule(target.prepare);
    stages["initialize"] = Capsule(target.initialize);
    stages["execute"] = Capsule(target.execute);
    table[target.name] = stages;
  }
  return table;
}

// {name: capsules}
nb::dict TypeTable() {
  nb::dict site;
  site["type_id"] = nb::capsule(static_cast<void*>(&SiteState::id));
  site["type_info"] = nb::capsule(static_cast<void*>(&kSiteInfo));
  nb::dict table;
  table["te_ffi_kernels_cuda13.Site"] = site;
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
nb::tuple LoadLibrary(const std::string& path) {
  std::string error;
  const size_t version = kLoad(path, &error);
  return nb::make_tuple(version, error);
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
  args.k = k;
  args.n = n;
  args.group = group;
  args.bits = bits;
  args.quantizes = quantizes;
  args.y_dtype = static_cast<te::Float>(out);
  return PackedSteps(args).bytes;
}

// The attributes of a call, from Python.
struct PythonAttributes {
  nb::dict values;

  template <typename T>
  std::optional<T> get(const char* name) const {
    T out;
    if (!values.contains(name) || !nb::try_cast(values[name], out)) return std::nullopt;
    return out;
  }
};

AttentionSteps StepsOf(const nb::dict& attributes, bool bfloat16, bool backward) {
  const ffi::AttentionConfig config(PythonAttributes{attributes});
  return AttentionSteps(config, bfloat16 ? DType::BF16 : DType::F16, backward);
}

// The workspace that the kernels of attention need beside cuDNN's own.
size_t AttentionWorkspace(const nb::dict& attributes, bool backward) {
  return StepsOf(attributes, true, backward).bytes;
}

// (cuDNN's workspace on a device, why cuDNN doesn't have this attention), the second empty where it
// does. The plan is kept for the handlers.
nb::tuple PlanAttention(const nb::dict& attributes, bool bfloat16, bool backward, int device) {
  const AttentionSteps steps = StepsOf(attributes, bfloat16, backward);
  const DnnPlans::Entry* entry = nullptr;
  {
    nb::gil_scoped_release others_run;
    entry = &AttentionPlans().of(cudnn(), runtime(), device, steps.graph);
  }
  return nb::make_tuple(entry->workspace, entry->why);
}

}  // namespace
}  // namespace jaxtap::cuda

NB_MODULE(_native, module) {
  module.attr("API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("CUDA_VERSION") = CUDART_VERSION;
  module.attr("LOSS_PART") = jaxtap::cuda::kLossPart;
  module.attr("GROUP_START") = sizeof(jaxtap::cuda::GroupStart);
  module.def("targets", &jaxtap::cuda::TargetTable);
  module.def("types", &jaxtap::cuda::TypeTable);
  module.def("warm_counts", &jaxtap::ffi::WarmCounts);
  module.def("compute_capability", &jaxtap::cuda::ComputeCapability);
  module.def("load_cublaslt", &jaxtap::cuda::LoadLibrary<jaxtap::cuda::load_cublaslt>);
  module.def("load_cudnn", &jaxtap::cuda::LoadLibrary<jaxtap::cuda::load_cudnn>);
  module.def("attention_workspace", &jaxtap::cuda::AttentionWorkspace, nb::arg("attributes"),
             nb::arg("backward"));
  module.def("plan_attention", &jaxtap::cuda::PlanAttention, nb::arg("attributes"),
             nb::arg("bfloat16"), nb::arg("backward"), nb::arg("device"));
  module.def("gemm_workspace", &jaxtap::cuda::GemmWorkspace, nb::arg("m"), nb::arg("n"),
             nb::arg("k"), nb::arg("scaling"), nb::arg("int8"), nb::arg("lhs_first"),
             nb::arg("rhs_first"), nb::arg("dtype"), nb::arg("out"), nb::arg("bias"),
             nb::arg("gelu"));
  module.def("packed_workspace", &jaxtap::cuda::PackedWorkspace, nb::arg("m"), nb::arg("k"),
             nb::arg("n"), nb::arg("group"), nb::arg("bits"), nb::arg("quantizes"),
             nb::arg("dtype"), nb::arg("out"));
  module.def("driver_version", &jaxtap::cuda::DriverVersion);
}
