// The Python module te_ffi_kernels_cuda13._native.

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "cuda/handlers/handler.h"

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

}  // namespace
}  // namespace jaxtap::cuda

NB_MODULE(_native, module) {
  module.attr("API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("CUDA_VERSION") = CUDART_VERSION;
  module.def("targets", &jaxtap::cuda::TargetTable);
  module.def("types", &jaxtap::cuda::TypeTable);
  module.def("warm_counts", &jaxtap::ffi::WarmCounts);
  module.def("driver_version", &jaxtap::cuda::DriverVersion);
}
