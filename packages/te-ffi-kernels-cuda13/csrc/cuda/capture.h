// Running a handler's body without running anything on the device: what it does on a stream is
// captured, and thrown away. Its modules are loaded by that, which is what a warm-up is for: a
// module that is loaded while kernels of NCCL wait for other devices can hang.
//
// The stream is one that nothing else uses. Another thread may launch on XLA's own at any time, and
// if that captured, the launch would be recorded and thrown away. No event orders the two streams:
// nothing of a capture runs, and a stream that waits for an event of one that captures joins in.
#pragma once

#include <utility>

#include "cuda/device_scope.h"
#include "cuda/runtime.h"
#include "cuda/streams.h"

namespace jaxtap::cuda {

// A capture of a stream, from construction to `finish`, or to destruction where an exception comes
// first. In either case the stream no longer captures, no graph is left, and no error stays behind
// in CUDA.
class ScopedStreamCapture {
 public:
  // Throws CudaError where the capture can't begin.
  ScopedStreamCapture(Runtime& cuda, Stream stream) : cuda_(cuda), stream_(stream) {
    const int begun = cuda_.begin_capture(stream_);
    if (begun == 0) return;
    // The error may be an earlier call's, which CUDA reports late, and the capture have begun.
    bool capturing = false;
    if (cuda_.is_capturing(stream_, &capturing) != 0 || capturing) abandon();
    active_ = false;
    cuda_.clear_error();
    cuda_.check(begun, "beginning a capture");
  }
  ScopedStreamCapture(const ScopedStreamCapture&) = delete;
  ScopedStreamCapture& operator=(const ScopedStreamCapture&) = delete;

  ~ScopedStreamCapture() {
    if (!active_) return;
    // An exception is on its way, which says more than what fails here.
    abandon();
    cuda_.clear_error();
  }

  // Ends the capture and throws away what it recorded. Throws CudaError where that failed; it's
  // over then, too.
  void finish() {
    if (!active_) return;
    active_ = false;
    const Failure first = abandon();
    if (first.code == 0) return;
    cuda_.clear_error();
    cuda_.check(first.code, first.what);
  }

 private:
  struct Failure {
    int code = 0;
    const char* what = "";

    void note(int found, const char* where) {
      if (code == 0 && found != 0) *this = {found, where};
    }
  };

  // A call that failed may have done nothing. Trying for ever helps nobody, though.
  static constexpr int kTries = 4;

  // Ends and destroys. Returns what failed first.
  Failure abandon() {
    Failure first;
    Graph graph = nullptr;
    for (int i = 0; i < kTries; ++i) {
      Graph found = nullptr;
      const int ended = cuda_.end_capture(stream_, &found);
      if (found != nullptr) graph = found;
      if (ended == 0) break;
      first.note(ended, "ending a capture");
      bool capturing = false;
      if (cuda_.is_capturing(stream_, &capturing) == 0 && !capturing) break;
    }
    if (graph == nullptr) return first;  // a capture that went wrong leaves none
    // Once: its handle means nothing after this, whatever it returns.
    first.note(cuda_.destroy_graph(graph), "destroying a captured graph");
    return first;
  }

  Runtime& cuda_;
  const Stream stream_;
  bool active_ = true;
};

// Calls body(stream) with a stream of `device` that captures. Returns false, without having called
// it, where `xla` captures already: somebody records a program of theirs, in which loading modules
// may be forbidden. An exception of the body is what is thrown, whatever fails after it.
template <typename Body>
bool dry_run(Runtime& cuda, PrivateStreams& streams, int device, Stream xla, Body&& body) {
  bool outer = false;
  const int asked = cuda.is_capturing(xla, &outer);
  if (asked != 0) {
    cuda.clear_error();
    cuda.check(asked, "asking whether the stream captures");
  }
  if (outer) return false;
  const DeviceScope scope(cuda, device);
  PrivateStream stream(cuda, streams, device);
  ScopedStreamCapture capture(cuda, stream.get());
  std::forward<Body>(body)(stream.get());
  capture.finish();
  stream.keep();
  return true;
}

}  // namespace jaxtap::cuda
