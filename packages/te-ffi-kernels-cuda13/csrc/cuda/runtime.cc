// CUDA's runtime, which is linked statically and opens the driver when it's first asked for
// something: a machine without one can load this.
#include "cuda/runtime.h"

#include <cuda_runtime_api.h>

namespace jaxtap::cuda {
namespace {

class Cuda : public Runtime {
 public:
  int create_stream(Stream* stream) override {
    return static_cast<int>(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
  }
  int destroy_stream(Stream stream) override {
    return static_cast<int>(cudaStreamDestroy(stream));
  }
  int is_capturing(Stream stream, bool* capturing) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(stream, &status);
    // One that went wrong still has to be ended, by whom it is of.
    *capturing = status != cudaStreamCaptureStatusNone;
    return static_cast<int>(code);
  }
  int begin_capture(Stream stream) override {
    return static_cast<int>(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  }
  int end_capture(Stream stream, Graph* graph) override {
    return static_cast<int>(cudaStreamEndCapture(stream, graph));
  }
  int destroy_graph(Graph graph) override { return static_cast<int>(cudaGraphDestroy(graph)); }
  int current_device(int* device) override { return static_cast<int>(cudaGetDevice(device)); }
  int set_device(int device) override { return static_cast<int>(cudaSetDevice(device)); }
  int set_memory(void* memory, int byte, size_t count, Stream stream) override {
    return static_cast<int>(cudaMemsetAsync(memory, byte, count, stream));
  }
  int read_memory(void* to, const void* memory, size_t count, Stream stream) override {
    const cudaError_t code = cudaMemcpyAsync(to, memory, count, cudaMemcpyDeviceToHost, stream);
    return static_cast<int>(code == cudaSuccess ? cudaStreamSynchronize(stream) : code);
  }
  void clear_error() override { static_cast<void>(cudaGetLastError()); }
  std::string text(int code) override {
    const auto error = static_cast<cudaError_t>(code);
    return std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error);
  }
};

}  // namespace

Runtime& runtime() {
  static auto* cuda = new Cuda;
  return *cuda;
}

}  // namespace jaxtap::cuda
