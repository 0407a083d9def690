// What on_device.cc needs of a device, as functions that return CUDA's error codes: CUDA's own, or
// in a rehearsal those of a device whose memory is some of the host's.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#if !defined(JAXTAP_REHEARSED)
#include <cuda_runtime_api.h>
#endif

namespace jaxtap::cuda::on_device {

#if defined(JAXTAP_REHEARSED)

inline int allocate(void** address, size_t size) {
  *address = std::malloc(size);
  // As on a GPU, what isn't copied there is something else.
  std::memset(*address, 0xCD, size);
  return 0;
}
inline int release(void* address) {
  std::free(address);
  return 0;
}
inline int upload(void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
  return 0;
}
inline int download(void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
  return 0;
}
inline int wait() { return 0; }
inline void clear_error() {}
inline std::string text_of(int) { return "no error"; }
inline std::string name_of(const void*) { return "a kernel in software"; }
inline std::string name_of_device() { return "memory of the host, as a rehearsal"; }

#else

inline int allocate(void** address, size_t size) { return cudaMalloc(address, size); }
inline int release(void* address) {
  const cudaError_t code = cudaFree(address);
  return code == cudaErrorCudartUnloading ? 0 : code;  // the process ends, and frees it
}
inline int upload(void* to, const void* from, size_t size) {
  return cudaMemcpy(to, from, size, cudaMemcpyHostToDevice);
}
inline int download(void* to, const void* from, size_t size) {
  return cudaMemcpy(to, from, size, cudaMemcpyDeviceToHost);
}
inline int wait() { return cudaDeviceSynchronize(); }
inline void clear_error() { cudaGetLastError(); }
inline std::string text_of(int code) {
  const auto error = static_cast<cudaError_t>(code);
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}
inline std::string name_of(const void* kernel) {
  const char* name = nullptr;
  return cudaFuncGetName(&name, kernel) == cudaSuccess && name != nullptr ? name : "unknown";
}
inline std::string name_of_device() {
  cudaDeviceProp found;
  int driver = 0;
  if (cudaGetDeviceProperties(&found, 0) != cudaSuccess) return "no GPU";
  cudaDriverGetVersion(&driver);
  return std::string(found.name) + ", compute capability " + std::to_string(found.major) + "." +
         std::to_string(found.minor) + ", whose driver has CUDA " + std::to_string(driver / 1000) +
         "." + std::to_string(driver % 1000 / 10);
}

#endif

}  // namespace jaxtap::cuda::on_device
