#include "cuda/emulator.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// A switch of stacks. That of ucontext asks the kernel for the signal mask each time.
#if defined(__x86_64__)
extern "C" void jaxtap_switch_stack(void** leave, void* enter);
asm(R"(
.text
.type jaxtap_switch_stack, @function
jaxtap_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size jaxtap_switch_stack, . - jaxtap_switch_stack
)");
#endif

namespace jaxtap::cuda::emulator {

Index thread_index, block_index, block_size, grid_size;

namespace {

constexpr size_t kStack = 256 << 10;
constexpr unsigned kWarp = 32;

enum class State { kReady, kAtWarp, kAtBlock, kDone };

#if defined(__x86_64__)
struct Context {
  void* stack = nullptr;
};

void change(Context& from, const Context& to) { jaxtap_switch_stack(&from.stack, to.stack); }

void make(Context& context, char* bottom, size_t size, void (*entry)()) {
  // As if `entry` had been called by nobody: its address above six registers, at an odd multiple
  // of 8 bytes once it has been taken.
  auto top = reinterpret_cast<uintptr_t>(bottom + size) / 16 * 16;
  auto* words = reinterpret_cast<void**>(top) - 2;
  words[1] = nullptr;
  words[0] = reinterpret_cast<void*>(entry);
  for (int i = 1; i <= 6; ++i) words[-i] = nullptr;
  context.stack = words - 6;
}
#else
using Context = ucontext_t;

void change(Context& from, const Context& to) { swapcontext(&from, &to); }

void make(Context& context, char* bottom, size_t size, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = bottom;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state = State::kReady;
  uint32_t shown[2][8] = {};
  unsigned turn = 0;
  void* fake_stack = nullptr;
};

std::vector<Fiber> fibers;
Context scheduler;
void* scheduler_fake_stack = nullptr;
const void* scheduler_bottom = nullptr;
size_t scheduler_size = 0;
unsigned current = 0;
const std::function<void()>* body = nullptr;

#if defined(__SANITIZE_ADDRESS__)
void leaving(void** save, const void* bottom, size_t size) {
  __sanitizer_start_switch_fiber(save, bottom, size);
}
void arrived(void* saved, const void** bottom, size_t* size) {
  __sanitizer_finish_switch_fiber(saved, bottom, size);
}
#else
void leaving(void**, const void*, size_t) {}
void arrived(void*, const void**, size_t*) {}
#endif

void to_scheduler(State state) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  leaving(state == State::kDone ? nullptr : &fiber.fake_stack, scheduler_bottom, scheduler_size);
  change(fiber.context, scheduler);
  arrived(fiber.fake_stack, &scheduler_bottom, &scheduler_size);
}

void enter() {
  arrived(nullptr, &scheduler_bottom, &scheduler_size);
  (*body)();
  to_scheduler(State::kDone);
}

void resume(unsigned thread) {
  current = thread;
  thread_index.x = thread;
  Fiber& fiber = fibers[thread];
  leaving(&scheduler_fake_stack, fiber.stack.get(), kStack);
  change(scheduler, fiber.context);
  arrived(scheduler_fake_stack, nullptr, nullptr);
}

// Lets threads [begin, end) go on if all that are left wait at a barrier of this kind.
bool release(unsigned begin, unsigned end, State barrier) {
  bool any = false;
  for (unsigned i = begin; i < end; ++i) {
    if (fibers[i].state == State::kDone) continue;
    if (fibers[i].state != barrier) return false;
    any = true;
  }
  for (unsigned i = begin; i < end; ++i) {
    if (fibers[i].state == barrier) fibers[i].state = State::kReady;
  }
  return any;
}

void begin(Fiber& fiber) {
  fiber.state = State::kReady;
  fiber.turn = 0;
  make(fiber.context, fiber.stack.get(), kStack, enter);
}

void run_block(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) begin(fibers[i]);
  for (unsigned round = 0;; ++round) {
    bool left = false;
    for (unsigned i = 0; i < threads; ++i) {
      // Forwards, backwards, and from the middle.
      const unsigned at = round % 3 == 0   ? i
                          : round % 3 == 1 ? threads - 1 - i
                                           : (i + threads / 2) % threads;
      if (fibers[at].state == State::kReady) resume(at);
      left = left || fibers[at].state != State::kDone;
    }
    if (!left) return;
    bool released = release(0, threads, State::kAtBlock);
    for (unsigned warp = 0; warp < threads; warp += kWarp) {
      const unsigned end = warp + kWarp < threads ? warp + kWarp : threads;
      released = release(warp, end, State::kAtWarp) || released;
    }
    if (!released) {
      std::fprintf(stderr, "threads of a block wait at different barriers\n");
      std::abort();
    }
  }
}

}  // namespace

void run(int blocks, int threads, const std::function<void()>& thread) {
  if (fibers.size() < static_cast<size_t>(threads)) {
    fibers = std::vector<Fiber>(static_cast<size_t>(threads));
  }
  body = &thread;
  block_size.x = static_cast<unsigned>(threads);
  grid_size.x = static_cast<unsigned>(blocks);
  for (unsigned block = 0; block < grid_size.x; ++block) {
    block_index.x = block;
    run_block(block_size.x);
  }
  body = nullptr;
}

void block_barrier() { to_scheduler(State::kAtBlock); }

void warp_exchange(const uint32_t* words, int count) {
  Fiber& mine = fibers[current];
  // In turns, so that what is shown next doesn't overwrite what others have yet to read.
  ++mine.turn;
  for (int i = 0; i < count; ++i) mine.shown[mine.turn % 2][i] = words[i];
  to_scheduler(State::kAtWarp);
}

const uint32_t* warp_exchanged(int lane) {
  const unsigned other = current / kWarp * kWarp + static_cast<unsigned>(lane);
  return fibers[other].shown[fibers[current].turn % 2];
}

}  // namespace jaxtap::cuda::emulator
