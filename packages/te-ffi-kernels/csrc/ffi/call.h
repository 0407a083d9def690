// Calls from XLA on CPU, read from XLA's interface in C. The one in C++, xla/ffi/api/ffi.h, makes a
// decoder of templates for each handler, which takes a compiler five seconds each.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>

#include "common/isa.h"
#include "common/parallel.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"
#include "ffi/registry.h"
#include "ffi/stages.h"
#include "xla/ffi/api/c_api.h"

namespace jaxtap::ffi {

// The attributes of a call, or a dictionary among them.
class Attributes {
 public:
  explicit Attributes(const XLA_FFI_Attrs& attributes) : attributes_(&attributes) {}

  bool contains(const char* name) const { return Find(name) >= 0; }

  // Nothing where there is none, or one of another type. T: int64_t, double, float, bool,
  // Attributes.
  template <typename T>
  std::optional<T> get(const char* name) const;

 private:
  int64_t Find(const char* name) const;
  template <typename T>
  std::optional<T> Scalar(const char* name, XLA_FFI_DataType dtype) const;

  const XLA_FFI_Attrs* attributes_;
};

template <>
std::optional<int64_t> Attributes::get(const char* name) const;
template <>
std::optional<double> Attributes::get(const char* name) const;
template <>
std::optional<float> Attributes::get(const char* name) const;
template <>
std::optional<bool> Attributes::get(const char* name) const;
template <>
std::optional<Attributes> Attributes::get(const char* name) const;

// An execution.
class Call {
 public:
  explicit Call(const XLA_FFI_CallFrame& frame) : attributes(frame.attrs), frame_(frame) {}

  // Throws for other numbers of them. Before any is read.
  void NeedCounts(int64_t operands, int64_t results) const;
  Array Operand(int64_t index, const char* name) const;
  Array Result(int64_t index, const char* name) const;

  const Attributes attributes;

 private:
  friend class XlaScheduler;
  const XLA_FFI_CallFrame& frame_;
};

// The intra-op thread pool of the program that runs, and awake workers. Of a call: it must not
// outlive it.
class XlaScheduler : public Scheduler {
 public:
  explicit XlaScheduler(const Call& call);
  XlaScheduler(const XlaScheduler&) = delete;
  XlaScheduler& operator=(const XlaScheduler&) = delete;
  ~XlaScheduler() override;

  int threads() const override { return threads_; }
  void schedule(std::function<void()> task) override;

 private:
  using Clock = std::chrono::steady_clock;

  const XLA_FFI_CallFrame& frame_;
  int threads_;
  Clock::time_point begin_{};  // of the first task
};

// What the stages do. `read` and `run` throw for what can't be.
XLA_FFI_Error* RunInstantiate(XLA_FFI_CallFrame* frame, const char* target,
                              void (*read)(const Attributes&));
XLA_FFI_Error* RunExecute(XLA_FFI_CallFrame* frame, const char* target,
                          void (*run)(const Call&, const Parallel&));

// The handlers of an op. Put one as a static variable beside the function, or in kernels.cc.
//
// `Op` describes the op for all platforms: it has a `kTarget`; a `Config`, which is made of the
// attributes; and is itself made of a call. Both throw for what can't be. kRun takes it and threads;
// or its `args`, which are a kernel's arguments, and threads, and where kernels want to be told the
// instruction set, that.
template <class Op, auto kRun>
struct Handlers {
  Handlers() { Targets().push_back({Op::kTarget, Instantiate, Execute}); }

 private:
  static XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
    return RunInstantiate(frame, Op::kTarget, [](const Attributes& attributes) {
      static_cast<void>(typename Op::Config(attributes));
    });
  }

  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    return RunExecute(frame, Op::kTarget, [](const Call& call, const Parallel& parallel) {
      const Op given(call);
      if constexpr (std::is_invocable_v<decltype(kRun), const Op&, const Parallel&>) {
        kRun(given, parallel);
      } else if constexpr (std::is_invocable_v<decltype(kRun), decltype((given.args)),
                                               const Parallel&>) {
        kRun(given.args, parallel);
      } else {
        kRun(given.args, parallel, selected_isa());
      }
    });
  }
};

}  // namespace jaxtap::ffi
