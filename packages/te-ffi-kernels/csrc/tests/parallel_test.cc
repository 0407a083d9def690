#include "common/parallel.h"

#include <stdexcept>

#include "tests/check.h"

namespace {

using namespace jaxtap;

// Keeps the helpers back until asked, as a busy pool does.
class Late : public Scheduler {
 public:
  int threads() const override { return 4; }
  void schedule(std::function<void()> task) override { tasks.push_back(std::move(task)); }
  std::vector<std::function<void()>> tasks;
};

TEST(parallel_runs_each_task_once) {
  Threads pool(3);
  for (int64_t tasks : {0, 1, 2, 3, 50, 1000}) {
    for (const Parallel& parallel : {Parallel(), Parallel(pool)}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      parallel.run(tasks, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (const std::atomic<int>& count : runs) CHECK(count == 1);
    }
  }
}

TEST(parallel_ranges_cover) {
  Threads pool(3);
  for (int64_t items : {0, 1, 7, 100}) {
    for (int64_t grain : {1, 3, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(items));
      Parallel(pool).ranges(items, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++runs[static_cast<size_t>(i)];
      });
      for (const std::atomic<int>& count : runs) CHECK(count == 1);
    }
  }
}

TEST(parallel_helpers_may_come_late) {
  Late late;
  int ran = 0;
  {
    const auto body = [&](int64_t) { ++ran; };
    Parallel(late).run(10, body);
  }
  CHECK(ran == 10);
  CHECK(late.tasks.size() == 3);
  for (const auto& task : late.tasks) task();  // the body is gone
  CHECK(ran == 10);
}

TEST(parallel_carries_exceptions) {
  Threads pool(2);
  for (const Parallel& parallel : {Parallel(), Parallel(pool)}) {
    std::atomic<int> ran{0};
    const auto body = [&](int64_t i) {
      ++ran;
      if (i == 3) throw std::runtime_error("task three");
    };
    CHECK(testing::throws<std::runtime_error>([&] { parallel.run(100, body); }, "task three"));
    CHECK(ran >= 1);
    parallel.run(5, [&](int64_t) { ++ran; });  // and goes on working
  }
}

TEST(parallel_nests) {
  Threads pool(3);
  std::atomic<int> ran{0};
  const Parallel parallel(pool);
  parallel.run(8, [&](int64_t) { parallel.run(8, [&](int64_t) { ++ran; }); });
  CHECK(ran == 64);
}

}  // namespace
