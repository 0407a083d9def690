// The Python module te_ffi_kernels._native.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "common/isa.h"
#include "ffi/registry.h"
#include "ffi/stages.h"

namespace nb = nanobind;

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// {target: (stages, why there is no warm-up)}
nb::dict TargetTable() {
  nb::dict table;
  for (const jaxtap::ffi::Target& target : jaxtap::ffi::Targets()) {
    nb::dict stages;
    if (target.instantiate != nullptr) stages["instantiate"] = Capsule(target.instantiate);
    stages["execute"] = Capsule(target.execute);
    table[target.name] = nb::make_tuple(stages, target.no_warm_up);
  }
  return table;
}

std::vector<std::string> IsaNames() {
  std::vector<std::string> names;
  for (jaxtap::Isa isa : jaxtap::available_isas()) names.push_back(jaxtap::name(isa));
  return names;
}

}  // namespace

NB_MODULE(_native, module) {
  module.attr("API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.def("targets", &TargetTable);
  module.def("warm_counts", &jaxtap::ffi::WarmCounts);
  module.def("isas", &IsaNames);
  module.def("isa", [] { return std::string(jaxtap::name(jaxtap::selected_isa())); });
}
