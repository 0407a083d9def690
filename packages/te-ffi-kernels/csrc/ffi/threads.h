// Loops on XLA's own threads.

#pragma once

#include <functional>
#include <utility>

#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxtap::ffi {

// The intra-op thread pool of the program that runs. Of a call: it must not outlive it.
class XlaScheduler : public Scheduler {
 public:
  explicit XlaScheduler(::xla::ffi::ThreadPool pool)
      : pool_(pool), threads_(static_cast<int>(pool.num_threads())) {}

  int threads() const override { return threads_; }

  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ::xla::ffi::ThreadPool pool_;
  int threads_;
};

}  // namespace jaxtap::ffi
