// The Python module te_ffi_kernels_cuda13._native.

#include "ffi/python.h"
// After it, as Python wants it.
#include <cuda_runtime_api.h>

#include "cuda/attention/steps.h"
#include "cuda/cublaslt.h"
#include "cuda/cudnn.h"
#include "cuda/gemm/handles.h"
#include "cuda/gemm/packed.h"
#include "cuda/gemm/plan.h"
#include "cuda/handlers/attention.h"
#include "cuda/handlers/handler.h"
#include "cuda/kernels/column_sums.h"
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

// Those of the devices in CUDA's order, as 90 for 9.0.
python::Object ComputeCapabilities() {
  python::Object list(PyList_New(0));
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return list;
  }
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    python::Check(PyList_Append(list.get(), python::ToPython(10 * major + minor).get()));
  }
  return list;
}

// (version, what went wrong), of which one is 0 or empty.
template <size_t (*kLoad)(const std::string&, std::string*)>
python::Object LoadLibrary(const std::string& path) {
  std::string error;
  const size_t version = kLoad(path, &error);
  return python::Tuple(version, error);
}

// Of the dtypes that matmuls have.
DType DTypeOf(const std::string& text) {
  for (const auto& [name, dtype] : {std::pair{"float32", DType::F32}, {"bfloat16", DType::BF16},
                                    {"float16", DType::F16}, {"float8_e4m3fn", DType::F8E4M3FN},
                                    {"float8_e5m2", DType::F8E5M2}, {"int8", DType::S8}}) {
    if (text == name) return dtype;
  }
  throw invalid_argument("no matmul is of ", text);
}

// A matmul without addresses.
te::Gemm GemmOf(int64_t m, int64_t n, int64_t k, int64_t scaling, const std::string& lhs,
                const std::string& rhs, bool lhs_k_is_last, bool rhs_k_is_last,
                const std::string& out, bool gelu) {
  te::Gemm args;
  args.m = m;
  args.n = n;
  args.k = k;
  args.scaling = te::scaling_of(scaling);
  args.lhs.dtype = DTypeOf(lhs);
  args.rhs.dtype = DTypeOf(rhs);
  args.lhs.k_is_last = lhs_k_is_last;
  args.rhs.k_is_last = rhs_k_is_last;
  args.out_dtype = te::float_of(DTypeOf(out));
  args.gelu = gelu;
  return args;
}

// The workspace that the kernels of a matmul need beside cuBLASLt's own.
size_t GemmBytes(int64_t m, int64_t n, int64_t k, int64_t scaling, std::string lhs,
                 std::string rhs, bool lhs_k_is_last, bool rhs_k_is_last, std::string out, bool bias,
                 bool gelu) {
  const te::Gemm args = GemmOf(m, n, k, scaling, lhs, rhs, lhs_k_is_last, rhs_k_is_last, out, gelu);
  return GemmWorkspace(args, bias).bytes;
}

// Why cuBLASLt has no algorithm for a matmul on a device within `limit` bytes; empty where it has.
std::string RefusedGemm(int device, int64_t limit, bool fast, int64_t m, int64_t n, int64_t k,
                        int64_t scaling, std::string lhs, std::string rhs, bool lhs_k_is_last,
                        bool rhs_k_is_last, std::string out, bool bias, bool gelu) {
  const te::Gemm args = GemmOf(m, n, k, scaling, lhs, rhs, lhs_k_is_last, rhs_k_is_last, out, gelu);
  python::OthersRun others_run;
  CublasLt& lt = cublaslt();
  const LtHandle handle = lt_handles().of(lt, runtime(), device);
  const DeviceScope scope(runtime(), device);
  return gemm_refusal(lt, handle, args, bias, fast, static_cast<size_t>(limit));
}

// The same of a matmul with a packed weight, with so many groups of rows or kOneGroup. Floats are
// numbered as te::Float is.
size_t PackedBytes(int64_t m, int64_t k, int64_t n, int64_t group, int bits, bool quantizes,
                   int64_t dtype, int64_t out, int64_t row_groups) {
  PackedMatmul args;
  args.x_dtype = static_cast<te::Float>(dtype);
  args.m = m;
  args.n = n;
  args.layout = panel_layout(k, group, bits);
  args.quantizes = quantizes;
  args.y_dtype = static_cast<te::Float>(out);
  args.row_groups = row_groups;
  return PackedWorkspace(args).bytes;
}

// Bytes of parts of `kinds` sums over rows for each column; 0 where rows are one part.
size_t SumsBytes(int64_t rows, int64_t cols, int64_t kinds) {
  return static_cast<size_t>(sum_numbers(rows, cols, kinds)) * sizeof(float);
}

AttentionWorkspace StepsOf(PyObject* attributes, bool bfloat16, bool backward) {
  const ffi::AttentionConfig config(python::Items{attributes});
  return AttentionWorkspace(config, bfloat16 ? DType::BF16 : DType::F16, backward);
}

// The workspace that the kernels of attention need beside cuDNN's own.
size_t AttentionBytes(PyObject* attributes, bool backward) {
  return StepsOf(attributes, true, backward).bytes;
}

// (cuDNN's workspace on a device, why cuDNN doesn't have this attention), the second empty where it
// does. The plan is kept for the handlers.
python::Object PlanAttention(PyObject* attributes, bool bfloat16, bool backward, int device) {
  const AttentionWorkspace steps = StepsOf(attributes, bfloat16, backward);
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
                         python::Method<ComputeCapabilities>("compute_capabilities"),
                         python::Method<LoadLibrary<load_cublaslt>>("load_cublaslt"),
                         python::Method<LoadLibrary<load_cudnn>>("load_cudnn"),
                         python::Method<AttentionBytes>("attention_workspace"),
                         python::Method<PlanAttention>("plan_attention"),
                         python::Method<GemmBytes>("gemm_workspace"),
                         python::Method<RefusedGemm>("refused_gemm"),
                         python::Method<PackedBytes>("packed_workspace"),
                         python::Method<SumsBytes>("sums_workspace"),
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
