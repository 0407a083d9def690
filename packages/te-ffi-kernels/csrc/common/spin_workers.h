// A few threads that stay awake between short calls.
//
// To wake a thread that sleeps takes tens of microseconds, as long as a small kernel. XLA's pool has
// as many threads as there are processors, and gives a task to one that sleeps although another is
// awake: then there is one thread more than processors, since the caller works, too. Where XLA runs a
// program's operations one after the other on one thread, as it does those of small arrays, two
// threads gained nothing over one. These are on top of XLA's pool, which still gets what they do not
// take.
#pragma once

#include <functional>

namespace jaxtap {

// Gives `task` to a worker that is awake and free. Returns whether there is one: if not, `task` is
// untouched.
bool run_on_worker(std::function<void()>& task);

// Wakes up to `threads` - 1 workers, which then wait for tasks: for after a short call, since
// others tend to follow. They sleep again when nothing came for a while, and after a long task.
void expect_tasks(int threads);

}  // namespace jaxtap
