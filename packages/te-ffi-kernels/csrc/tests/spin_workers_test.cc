#include "common/spin_workers.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace {

using namespace jaxtap;
using namespace std::chrono_literals;

// Whether `holds` does within some seconds.
template <class Condition>
bool soon(const Condition& holds) {
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// Wakes workers until one takes the task.
bool given(std::function<void()> task) {
  return soon([&] {
    expect_tasks(4);
    return run_on_worker(task);
  });
}

TEST(workers_leave_tasks_that_they_do_not_take) {
  expect_tasks(1);  // the caller alone
  CHECK(soon([] {
    std::function<void()> task = [] {};
    return !run_on_worker(task) && task != nullptr;
  }));
}

TEST(workers_run_each_task_once) {
  std::atomic<int> taken{0}, ran{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int j = 0; j < 500; ++j) {
        std::function<void()> task = [&] { ++ran; };
        expect_tasks(4);
        if (run_on_worker(task)) ++taken;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(given([&] { ++ran; }));
  ++taken;
  CHECK(soon([&] { return ran == taken; }));
}

TEST(workers_work_beside_their_caller) {
  std::atomic<bool> begun{false}, go_on{false}, done{false};
  CHECK(given([&] {
    begun = true;
    while (!go_on) std::this_thread::yield();
    done = true;
  }));
  CHECK(soon([&] { return begun.load(); }));
  CHECK(!done);
  go_on = true;
  CHECK(soon([&] { return done.load(); }));
}

TEST(workers_sleep_when_nothing_comes) {
  std::atomic<bool> done{false};
  CHECK(given([&] { done = true; }));
  CHECK(soon([&] { return done.load(); }));
  CHECK(soon([] {
    std::this_thread::sleep_for(20ms);
    std::function<void()> task = [] {};
    return !run_on_worker(task);
  }));
}

}  // namespace
