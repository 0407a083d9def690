// What of CUDA's runtime the handlers use, as an interface, so that tests can put one in its place
// that counts calls and fails. Needs no header of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
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

// A library of NVIDIA's as an interface: its functions return a code, 0 where they worked.
class Library {
 public:
  virtual ~Library() = default;
  virtual std::string text(int code) = 0;

  // Throws unless `code` is 0. `what` is what was tried.
  void check(int code, const char* what) {
    if (code == 0) return;
    throw CudaError(code, std::string(what) + " failed: " + text(code));
  }
};

// Owns one of a library's objects. What a destructor's call returns is of no use to anybody: either
// an exception is on its way, or the work is done.
template <auto kDestroy>
class Owned;
template <class Of, typename Object, int (Of::*kDestroy)(Object)>
class Owned<kDestroy> {
 public:
  explicit Owned(Of& library) : library_(&library) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object_ != nullptr) (library_->*kDestroy)(object_);
  }
  Object get() const { return object_; }
  // For functions that create one: what they leave there is owned even where they fail.
  Object* place() { return &object_; }

 private:
  Of* library_;
  Object object_ = nullptr;
};

// CUDA's error codes.
class Runtime : public Library {
 public:
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
};

// CUDA's own, or a test's.
Runtime& runtime();

// As library.check(code, what), of what may have left an error in CUDA: none stays behind.
inline void check_run(Library& library, int code, const char* what, Runtime& cuda = runtime()) {
  if (code != 0) cuda.clear_error();
  library.check(code, what);
}

// Zeros of what is there, if anything is.
inline void set_zero(void* memory, int64_t bytes, Stream stream, Runtime& cuda = runtime()) {
  if (memory == nullptr || bytes == 0) return;
  const int code = cuda.set_memory(memory, 0, static_cast<size_t>(bytes), stream);
  check_run(cuda, code, "clearing memory", cuda);
}

}  // namespace jaxtap::cuda
