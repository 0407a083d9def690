// The shared library of cuDNN that JAX's CUDA plugin uses, opened when it's asked for: a machine
// without it can load this. What cudnn-frontend calls of it is defined in cudnn_library.cc, hidden
// in this module, and found in that library. (cudnn-frontend can open libraries itself, but then
// opens CUDA's runtime too, of which this module has its own.)
#pragma once

#include <string>

namespace jaxtap::cuda {

// Returns cuDNN's version, or 0 with `error` set.
size_t open_cudnn(const std::string& path, std::string* error);
bool has_cudnn();

}  // namespace jaxtap::cuda
