// Loops over independent tasks, on the caller's thread and on helpers of a pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace jaxtap {

// Between two looks at what another thread changes.
inline void pause_spinning() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // yield does nothing on most processors
#endif
}

inline int64_t divide_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// Where the helpers come from: a thread pool that somebody else owns.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // Threads that can work on a loop at once, the caller among them.
  virtual int threads() const = 0;
  // Runs `task` once, some time, on another thread or within the call. It may be called late, when
  // the loop is over.
  virtual void schedule(std::function<void()> task) = 0;
};

// `run` is safe to call from several threads at once, and from within a task.
class Parallel {
 public:
  // Serial.
  Parallel() = default;
  // On `scheduler`, which must outlive this object but not the tasks that it was given.
  explicit Parallel(Scheduler& scheduler) : scheduler_(&scheduler) {}

  int threads() const { return scheduler_ == nullptr ? 1 : std::max(1, scheduler_->threads()); }

  // Calls body(i) for every i in [0, tasks), in any order, and returns when all are done. The
  // caller takes part, so it is never kept waiting by a busy pool. Each thread begins with adjacent
  // tasks, the caller with the first, so that it finds in its caches what it wrote in another loop
  // over the same rows. The first exception of a body is thrown here, and tasks that had not begun
  // are left out.
  void run(int64_t tasks, const std::function<void(int64_t)>& body) const {
    const int64_t helpers = std::min<int64_t>(threads(), tasks) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < tasks; ++i) body(i);
      return;
    }
    auto loop = std::make_shared<Loop>(tasks, helpers + 1, &body);
    for (int64_t i = 1; i <= helpers; ++i) {
      scheduler_->schedule([loop, i] { loop->work(i); });
    }
    loop->work(0);
    loop->wait();
  }

  // The same over ranges [begin, end) of at least `grain` items (the last may be shorter).
  void ranges(int64_t items, int64_t grain,
              const std::function<void(int64_t, int64_t)>& body) const {
    if (items <= 0) return;
    grain = std::max<int64_t>(grain, 1);
    // A few ranges per thread even out threads of different speed.
    const int64_t most = threads() == 1 ? 1 : 4 * static_cast<int64_t>(threads());
    const int64_t count = std::max<int64_t>(1, std::min(items / grain, most));
    const int64_t size = (items + count - 1) / count;
    run((items + size - 1) / size,
        [&](int64_t i) { body(i * size, std::min(items, (i + 1) * size)); });
  }

 private:
  // Adjacent tasks, and the first of them that nobody has begun.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  // State that the helpers share with the caller. A helper that comes late finds no task left, and
  // touches nothing but this.
  struct Loop {
    Loop(int64_t count, int64_t threads, const std::function<void(int64_t)>* f)
        : tasks(count), body(f), shares(static_cast<size_t>(threads)) {
      for (int64_t i = 0; i < threads; ++i) {
        shares[i].next.store(count * i / threads, std::memory_order_relaxed);
        shares[i].end = count * (i + 1) / threads;
      }
    }

    // The share of a thread, and then what is left of the others'.
    void work(int64_t thread) {
      const auto count = static_cast<int64_t>(shares.size());
      int64_t mine = 0;
      for (int64_t i = 0; i < count; ++i) mine += work_on(shares[(thread + i) % count]);
      if (mine == 0) return;
      if (done.fetch_add(mine, std::memory_order_acq_rel) + mine == tasks) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }

    int64_t work_on(Share& share) {
      for (int64_t mine = 0;; ++mine) {
        const int64_t i = share.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= share.end) return mine;
        if (failed.load(std::memory_order_relaxed)) continue;
        try {
          (*body)(i);
        } catch (...) {
          std::lock_guard<std::mutex> lock(mutex);
          if (!error) error = std::current_exception();
          failed.store(true, std::memory_order_relaxed);
        }
      }
    }

    void wait() {
      // The others are at their last task each: most often this is short.
      for (int spin = 0; spin < 2000; ++spin) {
        if (done.load(std::memory_order_acquire) == tasks) break;
        pause_spinning();
      }
      std::unique_lock<std::mutex> lock(mutex);
      finished.wait(lock, [&] { return done.load(std::memory_order_acquire) == tasks; });
      if (error) std::rethrow_exception(std::exchange(error, nullptr));
    }

    const int64_t tasks;
    const std::function<void(int64_t)>* const body;
    std::vector<Share> shares;
    std::atomic<int64_t> done{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::condition_variable finished;
    std::exception_ptr error;
  };

  Scheduler* scheduler_ = nullptr;
};

// A pool of its own, for programs that have no other.
class Threads : public Scheduler {
 public:
  // `threads` counts the caller: one less is started.
  explicit Threads(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    ready_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const override { return static_cast<int>(workers_.size()) + 1; }

  void schedule(std::function<void()> task) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    ready_.notify_one();
  }

 private:
  void serve() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace jaxtap
