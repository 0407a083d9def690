// Streams that warm-ups capture, one at a time each, and nothing else uses.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "cuda/runtime.h"

namespace jaxtap::cuda {

class PrivateStreams {
 public:
  // A stream of the thread's device, whose number is `device`: one that was given back, or a new
  // one. Throws CudaError where none can be made; nothing is left then.
  Stream take(Runtime& cuda, int device) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      std::vector<Stream>& free = free_[device];
      if (!free.empty()) {
        const Stream stream = free.back();
        free.pop_back();
        return stream;
      }
    }
    Stream made = nullptr;
    const int code = cuda.create_stream(&made);
    if (code != 0) drop(cuda, made);
    cuda.check(code, "creating a stream");
    return made;
  }

  void give_back(int device, Stream stream) {
    std::lock_guard<std::mutex> hold(lock_);
    free_[device].push_back(stream);
  }

  // Instead of giving it back: a stream after a failure may still capture.
  static void drop(Runtime& cuda, Stream stream) {
    if (stream != nullptr) cuda.destroy_stream(stream);
    cuda.clear_error();
  }

 private:
  std::mutex lock_;
  std::map<int, std::vector<Stream>> free_;
};

// Those of the process, for as long as it is: the driver may be gone when it ends.
inline PrivateStreams& private_streams() {
  static auto* streams = new PrivateStreams;
  return *streams;
}

// A stream from construction to destruction, which gives it back after `keep` alone.
class PrivateStream {
 public:
  PrivateStream(Runtime& cuda, PrivateStreams& streams, int device)
      : cuda_(cuda), streams_(streams), device_(device), stream_(streams.take(cuda, device)) {}
  PrivateStream(const PrivateStream&) = delete;
  PrivateStream& operator=(const PrivateStream&) = delete;
  ~PrivateStream() {
    if (good_) {
      streams_.give_back(device_, stream_);
    } else {
      PrivateStreams::drop(cuda_, stream_);
    }
  }

  Stream get() const { return stream_; }
  void keep() { good_ = true; }

 private:
  Runtime& cuda_;
  PrivateStreams& streams_;
  const int device_;
  const Stream stream_;
  bool good_ = false;
};

}  // namespace jaxtap::cuda
