// Warm-ups against a fake CUDA runtime: whatever fails, no stream is left capturing, no graph is
// left, no error stays behind, and the first error is the one that is told.
#include "cuda/capture.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/site.h"
#include "cuda/tests/fake_runtime.h"
#include "tests/check.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::cuda;
using namespace jaxtap::testing;

const Stream kStream = FakeRuntime::stream(1);

// Of everything that may be left behind, but for `kept` streams to use again.
bool clean(const FakeRuntime& fake, size_t kept) {
  return fake.capturing.empty() && fake.graphs.empty() && fake.misused == 0 &&
         fake.last_error == 0 && fake.streams.size() == kept;
}

int all_captures(const FakeRuntime& fake) {
  int found = 0;
  for (const auto& [stream, count] : fake.captures) found += count;
  return found;
}

// Calls of a body: what it does on the stream. Fails as a launch does.
void body_of(FakeRuntime& fake, Stream stream) {
  uint8_t memory[4] = {};
  fake.check(fake.set_memory(memory, 7, sizeof memory, stream), "a body's call");
  CHECK(memory[0] == 0 && fake.recorded == 1);
}

constexpr int kDevice = 2;  // another than the thread's

std::string run(FakeRuntime& fake) {
  PrivateStreams streams;
  try {
    CHECK(dry_run(fake, streams, kDevice, kStream, [&](Stream stream) { body_of(fake, stream); }));
  } catch (const CudaError& error) {
    return error.what();
  }
  return "";
}

TEST(capture_without_faults) {
  FakeRuntime fake;
  CHECK(run(fake).empty());
  const std::vector<std::string> wanted = {"is_capturing",  "current_device", "set_device",
                                           "create_stream", "begin_capture",  "set_memory",
                                           "end_capture",   "destroy_graph",  "set_device"};
  CHECK(fake.calls == wanted);
  CHECK(clean(fake, 1) && fake.device == 0);
  CHECK(fake.captures.count(kStream) == 0);
}

// XLA's stream is other threads', too: what they do there meanwhile is done.
TEST(capture_records_nothing_of_another_thread) {
  FakeRuntime fake;
  PrivateStreams streams;
  CallSite site;
  uint8_t theirs[4] = {};
  CHECK(site.warm(fake, streams, 0, kStream, [&](Stream stream) {
    body_of(fake, stream);
    std::thread other([&] {
      fake.check(fake.set_memory(theirs, 9, sizeof theirs, kStream), "another thread's call");
    });
    other.join();
  }));
  CHECK(theirs[0] == 9 && theirs[3] == 9);
  CHECK(fake.recorded == 1 && clean(fake, 1));
}

TEST(capture_uses_a_stream_again) {
  FakeRuntime fake;
  PrivateStreams streams;
  Stream first = nullptr;
  for (int i = 0; i < 3; ++i) {
    dry_run(fake, streams, 0, kStream, [&](Stream stream) {
      CHECK(first == nullptr || stream == first);
      first = stream;
    });
  }
  CHECK(clean(fake, 1));
  // Of another device it's another one, and so it is while the first captures.
  dry_run(fake, streams, 0, kStream, [&](Stream stream) {
    dry_run(fake, streams, 0, kStream, [&](Stream other) { CHECK(other != stream); });
    dry_run(fake, streams, 1, kStream, [&](Stream other) { CHECK(other != stream); });
  });
  CHECK(clean(fake, 3));
}

TEST(capture_with_a_fault_at_each_call) {
  for (bool late : {false, true}) {
    for (int at = 0; at < 12; ++at) {
      FakeRuntime fake;
      fake.faults = {{at, 700 + at, late}};
      const std::string told = run(fake);
      const std::string what = std::string(late ? "late" : "early") + " fault at call " +
                               std::to_string(at) + ": " + told;
      CHECK_THAT(clean(fake, told.empty()) && fake.device == 0, what);
      // The last but the first way back to the device, which is tried again.
      const std::string wanted =
          at < 8 ? "failed: fake error " + std::to_string(700 + at) : std::string();
      CHECK_THAT(told.find(wanted) != std::string::npos && told.empty() == wanted.empty(), what);
      CHECK_THAT(all_captures(fake) <= 1 && fake.captures.count(kStream) == 0, what);
    }
  }
}

TEST(capture_with_two_faults) {
  for (int variant = 0; variant < 4; ++variant) {
    for (int one = 0; one < 12; ++one) {
      for (int two = one + 1; two < 14; ++two) {
        FakeRuntime fake;
        fake.faults = {{one, 700 + one, (variant & 1) != 0}, {two, 700 + two, (variant & 2) != 0}};
        const std::string told = run(fake);
        const std::string what = "faults at calls " + std::to_string(one) + " and " +
                                 std::to_string(two) + ", variant " + std::to_string(variant) +
                                 ": " + told;
        CHECK_THAT(clean(fake, told.empty()), what);
        // The way back to the device is tried again, and can't be told of.
        if (fake.failed.empty() || one >= 8) {
          CHECK_THAT(told.empty(), what);
        } else {
          CHECK_THAT(told.find(std::to_string(fake.failed.front())) != std::string::npos, what);
        }
      }
    }
  }
}

// Bodies fail by themselves, too; then that is what is told, whatever fails after it.
TEST(capture_of_a_body_that_throws) {
  for (bool late : {false, true}) {
    for (int at = 3; at < 9; ++at) {
      FakeRuntime fake;
      if (at > 3) fake.faults = {{at, 700 + at, late}};
      PrivateStreams streams;
      const auto body = [&] {
        dry_run(fake, streams, 0, kStream,
                [](Stream) { throw std::invalid_argument("the body's own"); });
      };
      CHECK(throws<std::invalid_argument>(body, "the body's own"));
      CHECK(clean(fake, 0));
      CHECK(all_captures(fake) == 1);
    }
  }
}

TEST(capture_leaves_an_outer_one_alone) {
  FakeRuntime fake;
  PrivateStreams streams;
  fake.begin_capture(kStream);
  bool ran = false;
  CHECK(!dry_run(fake, streams, 0, kStream, [&](Stream) { ran = true; }));
  CHECK(!ran);
  CHECK(fake.capturing.count(kStream) == 1);
  CHECK(fake.count("begin_capture") == 1 && fake.count("end_capture") == 0);
  // One of another stream is no hindrance.
  CHECK(dry_run(fake, streams, 0, FakeRuntime::stream(2), [&](Stream) { ran = true; }));
  CHECK(ran && fake.capturing.size() == 1 && fake.graphs.empty());
}

TEST(capture_that_is_not_finished_is_ended) {
  FakeRuntime fake;
  {
    ScopedStreamCapture capture(fake, kStream);
    CHECK(fake.capturing.count(kStream) == 1);
  }
  CHECK(clean(fake, 0));
  CHECK(fake.count("end_capture") == 1 && fake.count("destroy_graph") == 1);
}

TEST(site_warms_once_per_device) {
  FakeRuntime fake;
  PrivateStreams streams;
  CallSite site, other;
  int ran = 0;
  for (int i = 0; i < 100; ++i) {
    for (int device : {0, 1, 70}) {
      const bool did = site.warm(fake, streams, device, kStream, [&](Stream) { ++ran; });
      CHECK(did == (i == 0));
    }
  }
  CHECK(ran == 3 && all_captures(fake) == 3);
  CHECK(other.warm(fake, streams, 0, kStream, [&](Stream) { ++ran; }));
  CHECK(ran == 4 && clean(fake, 3));
}

TEST(site_tries_again_after_a_failure) {
  for (int at = 0; at < 7; ++at) {
    FakeRuntime fake;
    PrivateStreams streams;
    fake.faults = {{at, 700, false}};
    CallSite site;
    const auto warm = [&] {
      fake.recorded = 0;
      return site.warm(fake, streams, 0, kStream, [&](Stream stream) { body_of(fake, stream); });
    };
    CHECK(throws<CudaError>([&] { warm(); }, "fake error 700"));
    CHECK(clean(fake, 0));
    CHECK(warm());
    CHECK(!warm());
    CHECK(clean(fake, 1));
  }
  FakeRuntime fake;
  PrivateStreams streams;
  CallSite site;
  fake.begin_capture(kStream);
  CHECK(!site.warm(fake, streams, 0, kStream, [](Stream) {}));
  Graph graph = nullptr;
  fake.end_capture(kStream, &graph);
  fake.destroy_graph(graph);
  CHECK(site.warm(fake, streams, 0, kStream, [](Stream) {}));
}

TEST(site_from_many_threads) {
  constexpr int kThreads = 16, kDevices = 4;
  FakeRuntime fake;
  fake.faults = {{0, 700, false}};  // whoever is first fails, and another one makes it good
  PrivateStreams streams;
  CallSite site;
  std::atomic<int> warmed{0}, failed{0}, go{0};
  int bodies[kDevices] = {};  // no atomics: of one thread at a time, or a sanitizer tells
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      ++go;
      while (go < kThreads) std::this_thread::yield();
      const int device = i % kDevices;
      for (int run = 0; run < 200; ++run) {
        try {
          warmed += site.warm(fake, streams, device, FakeRuntime::stream(device + 1),
                              [&](Stream) { ++bodies[device]; });
        } catch (const CudaError&) {
          ++failed;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(warmed == kDevices);
  CHECK(failed == 1);
  for (int count : bodies) CHECK(count == 1);
  CHECK(clean(fake, kDevices));
  CHECK(fake.count("destroy_graph") == kDevices);
}

}  // namespace
