// A small CUDA runtime in memory. It counts calls, knows which streams there are and which of them
// capture, and which graphs there are, and fails when it's told to. What is called on a stream that
// captures is recorded, and doesn't happen.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda/runtime.h"
#if defined(JAXTAP_ON_DEVICE)
#include "cuda/tests/on_device.h"
#endif

namespace jaxtap::testing {

// A failure at a call, counted from 0 over all functions.
struct Fault {
  int call;
  int code;
  bool late;  // the call does its work, and reports an error all the same
};

class FakeRuntime : public cuda::Runtime {
 public:
  using Stream = cuda::Stream;
  using Graph = cuda::Graph;

  std::vector<Fault> faults;
  std::vector<std::string> calls;  // names, in order
  std::map<Stream, int> captures;  // streams that capture, and how often that was begun
  std::set<Stream> capturing;
  std::set<Stream> streams;  // that were created
  std::set<Graph> graphs;
  std::vector<int> failed;  // error codes that were returned, in order
  int last_error = 0;
  int device = 0;
  int recorded = 0;  // calls on streams that captured
  int misused = 0;   // handles that weren't those of a graph or a stream

  static Stream stream(intptr_t number) { return reinterpret_cast<Stream>(16 * number); }

  int count(const std::string& name) const {
    int found = 0;
    for (const std::string& call : calls) found += call == name;
    return found;
  }

  int create_stream(Stream* out) override {
    return call("create_stream", [&] {
      *out = stream(1000 + ++made_);
      streams.insert(*out);
      return 0;
    });
  }

  int destroy_stream(Stream stream) override {
    // As in CUDA, a handle is gone with the call, even one that fails.
    {
      std::lock_guard<std::mutex> hold(lock_);
      if (streams.erase(stream) == 0) ++misused;
      capturing.erase(stream);
    }
    return call("destroy_stream", [] { return 0; });
  }

  int is_capturing(Stream stream, bool* out) override {
    return call("is_capturing", [&] {
      *out = capturing.count(stream) != 0;
      return 0;
    });
  }

  int begin_capture(Stream stream) override {
    return call("begin_capture", [&] {
      if (!capturing.insert(stream).second) return kIllegal;
      ++captures[stream];
      return 0;
    });
  }

  int end_capture(Stream stream, Graph* graph) override {
    return call("end_capture", [&] {
      *graph = nullptr;
      if (capturing.erase(stream) == 0) return kIllegal;
      *graph = reinterpret_cast<Graph>(++made_ * 16);
      graphs.insert(*graph);
      return 0;
    });
  }

  int destroy_graph(Graph graph) override {
    // As in CUDA, a handle is gone with the call, even one that fails.
    {
      std::lock_guard<std::mutex> hold(lock_);
      if (graphs.erase(graph) == 0) ++misused;
    }
    return call("destroy_graph", [] { return 0; });
  }

  int current_device(int* out) override {
    return call("current_device", [&] {
      *out = device;
      return 0;
    });
  }

  int set_device(int wanted) override {
    return call("set_device", [&] {
      device = wanted;
      return 0;
    });
  }

  int set_memory(void* memory, int byte, size_t size, Stream stream) override {
    return call("set_memory", [&] {
      if (capturing.count(stream) != 0) {
        ++recorded;
      } else {
        std::memset(memory, byte, size);
#if defined(JAXTAP_ON_DEVICE)
        cuda::on_device::mark_written(memory, size);
#endif
      }
      return 0;
    });
  }

  int read_memory(void* to, const void* memory, size_t size, Stream stream) override {
    return call("read_memory", [&] {
      if (capturing.count(stream) != 0) return kIllegal;
      std::memcpy(to, memory, size);
      return 0;
    });
  }

  void clear_error() override {
    std::lock_guard<std::mutex> hold(lock_);
    last_error = 0;
  }

  std::string text(int code) override { return "fake error " + std::to_string(code); }

  static constexpr int kIllegal = 401;

 private:
  template <typename Do>
  int call(const char* name, Do&& work) {
    std::lock_guard<std::mutex> hold(lock_);
    const int number = static_cast<int>(calls.size());
    calls.push_back(name);
    int code = 0;
    bool works = true;
    for (const Fault& fault : faults) {
      if (fault.call != number) continue;
      code = fault.code;
      works = fault.late;
    }
    const int found = works ? work() : 0;
    if (code == 0) code = found;
    if (code != 0) {
      last_error = code;
      failed.push_back(code);
    }
    return code;
  }

  std::mutex lock_;
  intptr_t made_ = 0;
};

}  // namespace jaxtap::testing
