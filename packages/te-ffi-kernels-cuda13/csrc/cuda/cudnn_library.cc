#include "cuda/cudnn_library.h"

#include <cudnn.h>

#include <mutex>

#include "cuda/library.h"

#define JAXTAP_CUDNN(one)                                                                         \
  one(cudnnGetVersion) one(cudnnGetErrorString) one(cudnnGetLastErrorString) one(cudnnCreate)     \
  one(cudnnDestroy) one(cudnnSetStream) one(cudnnGetStream) one(cudnnBackendCreateDescriptor)     \
  one(cudnnBackendDestroyDescriptor) one(cudnnBackendFinalize) one(cudnnBackendExecute)           \
  one(cudnnBackendGetAttribute) one(cudnnBackendSetAttribute)

namespace jaxtap::cuda {
namespace {

JAXTAP_DEFINE_FUNCTIONS(JAXTAP_CUDNN)

std::mutex lock;
Functions* loaded = nullptr;  // never unloaded: plans live as long as the process

}  // namespace

size_t open_cudnn(const std::string& path, std::string* error) {
  std::lock_guard<std::mutex> hold(lock);
  if (loaded == nullptr) {
    loaded = open_library<Functions>(path, error).release();
    if (loaded == nullptr) return 0;
  }
  return loaded->cudnnGetVersion();
}

bool has_cudnn() {
  std::lock_guard<std::mutex> hold(lock);
  return loaded != nullptr;
}

}  // namespace jaxtap::cuda

// Called by who has looked whether the library is there.
using jaxtap::cuda::loaded;

size_t cudnnGetVersion() { return loaded->cudnnGetVersion(); }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return loaded->cudnnGetErrorString(status);
}
void cudnnGetLastErrorString(char* message, size_t most) {
  loaded->cudnnGetLastErrorString(message, most);
}
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { return loaded->cudnnCreate(handle); }
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return loaded->cudnnDestroy(handle); }
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  return loaded->cudnnSetStream(handle, stream);
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  return loaded->cudnnGetStream(handle, stream);
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  return loaded->cudnnBackendCreateDescriptor(type, descriptor);
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  return loaded->cudnnBackendDestroyDescriptor(descriptor);
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  return loaded->cudnnBackendFinalize(descriptor);
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t arrays) {
  return loaded->cudnnBackendExecute(handle, plan, arrays);
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t most,
                                       int64_t* count, void* values) {
  return loaded->cudnnBackendGetAttribute(descriptor, name, type, most, count, values);
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void* values) {
  return loaded->cudnnBackendSetAttribute(descriptor, name, type, count, values);
}
