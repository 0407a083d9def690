// What of cuDNN the handlers use, as an interface, so that tests can put one in its place that
// computes on the CPU, counts calls and fails. Needs no header of CUDA.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/attention/graph.h"
#include "cuda/runtime.h"

// As cuDNN's header names it.
struct cudnnContext;

namespace jaxtap::cuda {

using DnnHandle = cudnnContext*;
// Opaque: a graph that is ready to be run, on one kind of device.
struct DnnPlanTag;
using DnnPlan = DnnPlanTag*;

// cuDNN's statuses.
class Cudnn : public Library {
 public:
  virtual int create(DnnHandle* handle) = 0;
  virtual int destroy(DnnHandle handle) = 0;
  // Of what is run by the handle after this.
  virtual int set_stream(DnnHandle handle, Stream stream) = 0;
  // A plan, and the workspace that it needs. Where cuDNN doesn't have such a graph there is none,
  // and `why` says why.
  virtual int build(DnnHandle handle, const AttentionGraph& graph, DnnPlan* plan, size_t* workspace,
                    std::string* why) = 0;
  virtual int destroy_plan(DnnPlan plan) = 0;
  virtual int execute(DnnHandle handle, DnnPlan plan, const AttentionArrays& arrays,
                      void* workspace) = 0;
};

// NVIDIA's, or a test's. Throws where NVIDIA's isn't loaded.
Cudnn& cudnn();

// Loads the shared library at `path`, or of that name, unless one is loaded. Returns its version,
// as 91600 for 9.16.0, or 0 with `error` set.
size_t load_cudnn(const std::string& path, std::string* error);

using OwnedDnnHandle = Owned<&Cudnn::destroy>;
using OwnedDnnPlan = Owned<&Cudnn::destroy_plan>;

}  // namespace jaxtap::cuda
