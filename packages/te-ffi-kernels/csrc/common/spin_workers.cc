#include "common/spin_workers.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "common/parallel.h"

namespace jaxtap {
namespace {

using Clock = std::chrono::steady_clock;
// How long a worker waits: longer than what small programs do between two calls.
constexpr std::chrono::microseconds kAwake(200);
// After a task longer than this, waking takes little time in proportion.
constexpr std::chrono::microseconds kLong(100);
constexpr int kMost = 3;  // a short call has no work for more

class alignas(64) Worker {
 public:
  bool give(std::function<void()>& task) {
    State expected = State::kFree;
    if (state_.load(std::memory_order_relaxed) != expected ||
        !state_.compare_exchange_strong(expected, State::kClaimed, std::memory_order_acquire)) {
      return false;
    }
    task_ = std::move(task);
    state_.store(State::kGiven, std::memory_order_release);
    return true;
  }

  void wake() {
    if (state_.load(std::memory_order_relaxed) != State::kAsleep) return;
    std::lock_guard<std::mutex> lock(mutex_);
    State expected = State::kAsleep;
    if (state_.compare_exchange_strong(expected, State::kFree)) woken_.notify_one();
  }

  [[noreturn]] void serve() {
    for (;;) {
      sleep();
      while (wait()) {
        const auto begin = Clock::now();
        std::exchange(task_, nullptr)();
        const bool long_task = Clock::now() - begin > kLong;
        state_.store(long_task ? State::kAsleep : State::kFree, std::memory_order_release);
        if (long_task) break;
      }
    }
  }

 private:
  enum class State { kAsleep, kFree, kClaimed, kGiven };

  void sleep() {
    std::unique_lock<std::mutex> lock(mutex_);
    woken_.wait(lock, [&] { return state_.load() != State::kAsleep; });
  }

  // Returns true for a task, false for time to sleep.
  bool wait() {
    const auto end = Clock::now() + kAwake;
    for (;;) {
      for (int spin = 0; spin < 32; ++spin) {
        if (state_.load(std::memory_order_acquire) == State::kGiven) return true;
        pause_spinning();
      }
      State expected = State::kFree;
      if (Clock::now() > end && state_.compare_exchange_strong(expected, State::kAsleep)) {
        return false;
      }
      std::this_thread::yield();  // to threads that have something to do
    }
  }

  std::atomic<State> state_{State::kAsleep};
  std::function<void()> task_;
  std::mutex mutex_;
  std::condition_variable woken_;
};

struct Workers {
  std::array<Worker, kMost> all;
  std::atomic<int> started{0};
  std::mutex starting;
};

// Never destroyed: its threads run until the process ends.
Workers& workers() {
  static Workers& found = *new Workers;
  return found;
}

}  // namespace

bool run_on_worker(std::function<void()>& task) {
  Workers& all = workers();
  const int count = all.started.load(std::memory_order_acquire);
  return std::any_of(all.all.begin(), all.all.begin() + count,
                     [&](Worker& one) { return one.give(task); });
}

void expect_tasks(int threads) {
  Workers& all = workers();
  const int wanted = std::min(threads - 1, kMost);
  if (all.started.load(std::memory_order_acquire) < wanted) {
    std::lock_guard<std::mutex> lock(all.starting);
    try {
      for (int i = all.started; i < wanted; ++i) {
        std::thread([&one = all.all[static_cast<size_t>(i)]] { one.serve(); }).detach();
        all.started.store(i + 1, std::memory_order_release);
      }
    } catch (const std::system_error&) {
      return;  // the process may start no more threads: XLA's pool has the tasks
    }
  }
  std::for_each(all.all.begin(), all.all.begin() + std::max(wanted, 0),
                [](Worker& one) { one.wake(); });
}

}  // namespace jaxtap
