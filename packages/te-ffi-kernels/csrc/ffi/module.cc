// The Python module te_ffi_kernels._native.

#include "ffi/python.h"
// After it, as Python wants it.
#include <string>
#include <vector>

#include "common/isa.h"
#include "ffi/registry.h"
#include "ffi/stages.h"

namespace jaxtap::python {
namespace {

// {target: stages}
Dict TargetTable() {
  Dict table;
  for (const ffi::Target& target : ffi::Targets()) {
    Dict stages;
    stages.set("instantiate", Capsule(target.instantiate));
    stages.set("execute", Capsule(target.execute));
    table.set(target.name, std::move(stages));
  }
  return table;
}

std::vector<std::string> IsaNames() {
  std::vector<std::string> names;
  for (Isa isa : available_isas()) names.push_back(name(isa));
  return names;
}

std::string IsaName() { return name(selected_isa()); }

PyMethodDef methods[] = {Method<TargetTable>("targets"), Method<ffi::WarmCounts>("warm_counts"),
                         Method<IsaNames>("isas"), Method<IsaName>("isa"), {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1,     methods,
                          nullptr,               nullptr,   nullptr, nullptr};

}  // namespace
}  // namespace jaxtap::python

PyMODINIT_FUNC PyInit__native() {
  using namespace jaxtap::python;
  return Guarded([] {
    Object module(PyModule_Create(&definition));
    SetAttribute(module, "API_VERSION", Tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR));
    return module;
  });
}
