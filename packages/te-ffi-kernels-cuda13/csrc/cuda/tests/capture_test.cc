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

// Of everything that may be left behind.
bool clean(const FakeRuntime& fake) {
  return fake.capturing.empty() && fake.graphs.empty() && fake.misused == 0 && fake.last_error == 0;
}

// Calls of a body: what it does on the stream. Fails as a launch does.
void body_of(FakeRuntime& fake) {
  uint8_t memory[4];
  fake.check(fake.set_memory(memory, 0, sizeof memory, kStream), "a body's call");
}

std::string run(FakeRuntime& fake) {
  try {
    CHECK(dry_run(fake, kStream, [&] { body_of(fake); }));
  } catch (const CudaError& error) {
    return error.what();
  }
  return "";
}

TEST(capture_without_faults) {
  FakeRuntime fake;
  CHECK(run(fake).empty());
  const std::vector<std::string> wanted = {"is_capturing", "begin_capture", "set_memory",
                                           "end_capture", "destroy_graph"};
  CHECK(fake.calls == wanted);
  CHECK(clean(fake));
}

TEST(capture_with_a_fault_at_each_call) {
  for (bool late : {false, true}) {
    for (int at = 0; at < 8; ++at) {
      FakeRuntime fake;
      fake.faults = {{at, 700 + at, late}};
      const std::string told = run(fake);
      const std::string what = std::string(late ? "late" : "early") + " fault at call " +
                               std::to_string(at) + ": " + told;
      CHECK_THAT(clean(fake), what);
      const std::string wanted =
          at < 5 ? "failed: fake error " + std::to_string(700 + at) : std::string();
      CHECK_THAT(told.find(wanted) != std::string::npos && told.empty() == wanted.empty(), what);
      CHECK_THAT(fake.captures[kStream] <= 1, what);
    }
  }
}

TEST(capture_with_two_faults) {
  for (int variant = 0; variant < 4; ++variant) {
    for (int one = 0; one < 8; ++one) {
      for (int two = one + 1; two < 10; ++two) {
        FakeRuntime fake;
        fake.faults = {{one, 700 + one, (variant & 1) != 0}, {two, 700 + two, (variant & 2) != 0}};
        const std::string told = run(fake);
        const std::string what = "faults at calls " + std::to_string(one) + " and " +
                                 std::to_string(two) + ", variant " + std::to_string(variant) +
                                 ": " + told;
        CHECK_THAT(clean(fake), what);
        if (fake.failed.empty()) {
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
    for (int at = 1; at < 8; ++at) {
      FakeRuntime fake;
      if (at > 1) fake.faults = {{at, 700 + at, late}};
      const auto body = [&] {
        dry_run(fake, kStream, [] { throw std::invalid_argument("the body's own"); });
      };
      CHECK(throws<std::invalid_argument>(body, "the body's own"));
      CHECK(clean(fake));
      CHECK(fake.captures[kStream] == 1);
    }
  }
}

TEST(capture_leaves_an_outer_one_alone) {
  FakeRuntime fake;
  fake.begin_capture(kStream);
  bool ran = false;
  CHECK(!dry_run(fake, kStream, [&] { ran = true; }));
  CHECK(!ran);
  CHECK(fake.capturing.count(kStream) == 1);
  CHECK(fake.count("begin_capture") == 1 && fake.count("end_capture") == 0);
  // One of another stream is no hindrance.
  CHECK(dry_run(fake, FakeRuntime::stream(2), [&] { ran = true; }));
  CHECK(ran && fake.capturing.size() == 1 && fake.graphs.empty());
}

TEST(capture_that_is_not_finished_is_ended) {
  FakeRuntime fake;
  {
    ScopedStreamCapture capture(fake, kStream);
    CHECK(capture.active() && fake.capturing.count(kStream) == 1);
  }
  CHECK(clean(fake));
  CHECK(fake.count("end_capture") == 1 && fake.count("destroy_graph") == 1);
}

TEST(site_warms_once_per_device) {
  FakeRuntime fake;
  Site site, other;
  int ran = 0;
  for (int i = 0; i < 100; ++i) {
    for (int device : {0, 1, 70}) {
      const bool did = site.warm(fake, device, kStream, [&] { ++ran; });
      CHECK(did == (i == 0));
    }
  }
  CHECK(ran == 3 && fake.captures[kStream] == 3);
  CHECK(other.warm(fake, 0, kStream, [&] { ++ran; }));
  CHECK(ran == 4 && clean(fake));
}

TEST(site_tries_again_after_a_failure) {
  for (int at = 0; at < 5; ++at) {
    FakeRuntime fake;
    fake.faults = {{at, 700, false}};
    Site site;
    const auto warm = [&] { return site.warm(fake, 0, kStream, [&] { body_of(fake); }); };
    CHECK(throws<CudaError>([&] { warm(); }, "fake error 700"));
    CHECK(clean(fake));
    CHECK(warm());
    CHECK(!warm());
    CHECK(clean(fake));
  }
  FakeRuntime fake;
  Site site;
  fake.begin_capture(kStream);
  CHECK(!site.warm(fake, 0, kStream, [] {}));
  Graph graph = nullptr;
  fake.end_capture(kStream, &graph);
  fake.destroy_graph(graph);
  CHECK(site.warm(fake, 0, kStream, [] {}));
}

TEST(site_from_many_threads) {
  constexpr int kThreads = 16, kDevices = 4;
  FakeRuntime fake;
  fake.faults = {{0, 700, false}};  // whoever is first fails, and another one makes it good
  Site site;
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
          warmed += site.warm(fake, device, FakeRuntime::stream(device + 1),
                              [&] { ++bodies[device]; });
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
  CHECK(clean(fake));
  CHECK(fake.count("destroy_graph") == kDevices);
}

}  // namespace
