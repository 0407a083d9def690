// Shared libraries, which are opened when they're needed: a machine without them can load this
// module.
#pragma once

#include <dlfcn.h>

#include <memory>
#include <string>

namespace jaxtap::cuda {

// Defines Functions: pointers to a library's functions, which `list(one)` has as one(name) each.
#define JAXTAP_FUNCTION(name) decltype(&::name) name = nullptr;
#define JAXTAP_READ_FUNCTION(name)                                         \
  this->name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name)); \
  if (this->name == nullptr) missing = #name;
#define JAXTAP_DEFINE_FUNCTIONS(list)                               \
  struct Functions {                                                \
    list(JAXTAP_FUNCTION);                                          \
    /* Returns the name of one that isn't there, or nullptr. */     \
    const char* read(void* library) {                               \
      const char* missing = nullptr;                                \
      list(JAXTAP_READ_FUNCTION);                                   \
      return missing;                                               \
    }                                                               \
  };

// Opens the library at `path`, or of that name, and returns its Functions, whose read(library)
// returns the name of one that isn't there, or nullptr. Returns nullptr with `error` set where that
// doesn't work. What is opened stays open.
template <class Functions>
std::unique_ptr<Functions> open_library(const std::string& path, std::string* error) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    *error = why == nullptr ? path + " can't be opened" : why;
    return nullptr;
  }
  auto functions = std::make_unique<Functions>();
  if (const char* missing = functions->read(library)) {
    dlclose(library);
    *error = path + " has no " + missing;
    return nullptr;
  }
  return functions;
}

}  // namespace jaxtap::cuda
