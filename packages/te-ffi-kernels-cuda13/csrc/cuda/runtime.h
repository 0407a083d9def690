// What of CUDA's runtime the handlers use, as an interface, so that tests can put one in its place
// that counts calls and fails. Needs no header of CUDA.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

// As CUDA's headers name them.
struct CUstream_st;
struct CUgraph_st;

namespace jaxtap::cuda {

using Stream = CUstream_st*;
using Graph = CUgraph_st*;

// A call of CUDA that failed.
class CudaError : public std::runtime_error {
 public:
  CudaError(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

// Each function returns CUDA's error code, 0 where it worked.
class Runtime {
 public:
  virtual ~Runtime() = default;
  // Of the thread's device; one that doesn't wait for the default stream, nor the other way round.
  virtual int create_stream(Stream* stream) = 0;
  virtual int destroy_stream(Stream stream) = 0;
  virtual int is_capturing(Stream stream, bool* capturing) = 0;
  // In the mode "relaxed": the body may do what a strict capture forbids, such as load a module.
  virtual int begin_capture(Stream stream) = 0;
  virtual int end_capture(Stream stream, Graph* graph) = 0;
  virtual int destroy_graph(Graph graph) = 0;
  // Of the thread's calls.
  virtual int current_device(int* device) = 0;
  virtual int set_device(int device) = 0;
  virtual int set_memory(void* memory, int byte, size_t count, Stream stream) = 0;
  // Copies to the host, and waits for what is on the stream. Not while it captures.
  virtual int read_memory(void* to, const void* memory, size_t count, Stream stream) = 0;
  // CUDA keeps the last error of a thread until this asks for it.
  virtual void clear_error() = 0;
  virtual std::string text(int code) = 0;

  // Throws unless `code` is 0. `what` is what was tried.
  void check(int code, const char* what) {
    if (code == 0) return;
    throw CudaError(code, std::string(what) + " failed: " + text(code));
  }
};

// CUDA's own, or a test's.
Runtime& runtime();

}  // namespace jaxtap::cuda
