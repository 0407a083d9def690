// The stages of a target on CUDA. XLA calls
//   instantiate  once per call site and loaded executable, with the attributes: makes a CallSite
//   initialize   before each execution, with all that `execute` gets: the CallSite lets the body
//                run once per device, inside of a capture of another stream than XLA's, so that its
//                modules are loaded
//   execute      for each call: the body, which allocates nothing and never waits for the device.
//                It may be part of a CUDA graph (XLA's command buffers).
// Targets whose work is planned have a stage `prepare` as well: planned.h.

#pragma once

#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/runtime.h"
#include "cuda/site.h"
#include "ffi/buffers.h"
#include "ffi/stages.h"
#include "xla/ffi/api/ffi.h"

namespace jaxtap::cuda {

namespace xffi = ::xla::ffi;
using ffi::Array;

// A call site's state, of a type that XLA knows.
struct SiteState : CallSite {
  static xffi::TypeId id;
};

inline Array Read(const char* name, const xffi::AnyBuffer& buffer) {
  const auto sizes = buffer.dimensions();
  const auto dtype = static_cast<XLA_FFI_DataType>(buffer.element_type());
  return {name, buffer.untyped_data(), ffi::FromXla(dtype, name), {sizes.begin(), sizes.size()}};
}

// As ffi::Guarded, for XLA's interface in C++.
template <typename Body>
xffi::Error Guarded(const char* target, Body&& body) {
  ffi::Failure failure = ffi::Guarded(target, body);
  if (failure.code == XLA_FFI_Error_Code_OK) return xffi::Error::Success();
  return xffi::Error(static_cast<xffi::ErrorCode>(failure.code), std::move(failure.message));
}

// Whether calls may be part of CUDA graphs; those that wait for the device may not.
enum class Graphs { kNo, kYes };

template <Graphs kGraphs>
inline constexpr std::initializer_list<xffi::Traits> kTraits = {};
template <>
inline constexpr std::initializer_list<xffi::Traits> kTraits<Graphs::kYes> = {
    xffi::Traits::kCmdBufferCompatible};

// Whether a workspace is the last result, beside those that the op has on all platforms.
enum class Workspace { kNone, kMaybe, kIs };

struct Call {
  Stream stream;
  const xffi::RemainingArgs& args;
  const xffi::RemainingRets& results;
  const xffi::Dictionary& attributes;
  Workspace workspace = Workspace::kNone;

  // Throws for other numbers of them, of which results are without the workspace.
  void NeedCounts(size_t operands, size_t without) const {
    const bool has = workspace == Workspace::kIs ||
                     (workspace == Workspace::kMaybe && results.size() == without + 1);
    const size_t wanted = without + has;
    if (args.size() != operands || results.size() != wanted) {
      throw invalid_argument("there are ", args.size(), " operands and ", results.size(),
                             " results, and there must be ", operands, " and ", wanted);
    }
  }

  Array Operand(size_t index, const char* name) const {
    const auto buffer = args.get<xffi::AnyBuffer>(index);
    if (!buffer.has_value()) throw invalid_argument(name, " can't be read");
    return Read(name, *buffer);
  }

  Array Result(size_t index, const char* name) const {
    auto buffer = results.get<xffi::AnyBuffer>(index);
    if (!buffer.has_value()) throw invalid_argument(name, " can't be written");
    return Read(name, **buffer);
  }

  // The last result.
  Array Memory(DType dtype = DType::U8) const {
    const Array found = Result(results.size() - 1, "workspace");
    found.NeedDtype({dtype});
    return found;
  }

  // Zeros for results that aren't wanted.
  void Clear(const std::vector<Array>& arrays) const {
    for (const Array& array : arrays) {
      set_zero(array.data, array.size() * static_cast<int64_t>(byte_size(array.dtype)), stream);
    }
  }
};

// The same call, on another stream.
inline Call OnStream(const Call& call, Stream stream) {
  return {stream, call.args, call.results, call.attributes, call.workspace};
}

struct Target {
  const char* name;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* prepare = nullptr;
};

inline std::vector<Target>& Targets() {
  static auto* targets = new std::vector<Target>;
  return *targets;
}

// The stages that don't depend on whether work is planned.
template <class Op, Workspace kWorkspace>
class Stages {
 protected:
  static constexpr auto kTarget = Op::kTarget;

  // Makes the state of a call site whose attributes can be.
  static XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        xffi::Ffi::BindInstantiate()
            .Attrs()
            .To([](xffi::Dictionary attributes) -> xffi::ErrorOr<std::unique_ptr<SiteState>> {
              xffi::Error error =
                  Guarded(kTarget, [&] { static_cast<void>(typename Op::Config(attributes)); });
              if (error.failure()) return xffi::Unexpected(std::move(error));
              return std::make_unique<SiteState>();
            })
            .release();
    return handler->Call(frame);
  }

  // kReady lets the site's device be warmed up.
  template <bool (*kReady)(const Call&, SiteState&, int)>
  static XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        xffi::Ffi::Bind<xffi::ExecutionStage::kInitialize>()
            .Ctx<xffi::PlatformStream<Stream>>()
            .Ctx<xffi::DeviceOrdinal>()
            .Ctx<xffi::State<SiteState>>()
            .RemainingArgs()
            .RemainingRets()
            .Attrs()
            .To([](Stream stream, int32_t device, SiteState* site, xffi::RemainingArgs args,
                   xffi::RemainingRets results, xffi::Dictionary attributes) {
              return Guarded(kTarget, [&] {
                if (kReady({stream, args, results, attributes, kWorkspace}, *site, device)) {
                  ffi::CountWarm(kTarget);
                }
              });
            })
            .release();
    return handler->Call(frame);
  }
};

// The handlers of an op, which `Op` describes for all platforms: see ffi/call.h.
template <class Op, void (*kRun)(const Op&, const Call&), Workspace kWorkspace = Workspace::kNone>
class Handlers : Stages<Op, kWorkspace> {
 public:
  // Put as a static variable beside the body.
  Handlers() {
    using Common = Stages<Op, kWorkspace>;
    Targets().push_back(
        {Op::kTarget, Common::Instantiate, Common::template Initialize<Ready>, Execute});
  }

 private:
  static bool Ready(const Call& call, SiteState& site, int device) {
    return site.warm(runtime(), private_streams(), device, call.stream, [&](Stream stream) {
      const Call there = OnStream(call, stream);
      kRun(Op(there), there);
    });
  }

  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        xffi::Ffi::Bind()
            .Ctx<xffi::PlatformStream<Stream>>()
            .RemainingArgs()
            .RemainingRets()
            .Attrs()
            .To(
                [](Stream stream, xffi::RemainingArgs args, xffi::RemainingRets results,
                   xffi::Dictionary attributes) {
                  return Guarded(Op::kTarget, [&] {
                    const Call call = {stream, args, results, attributes, kWorkspace};
                    kRun(Op(call), call);
                  });
                },
                {xffi::Traits::kCmdBufferCompatible})
            .release();
    return handler->Call(frame);
  }
};

template <class Op, auto kKernel>
void RunKernel(const Op& given, const Call& call) {
  kKernel(given.args, call.stream);
}

// Those of a kernel that takes the arguments as the description has them.
template <class Op, auto kKernel>
using KernelHandlers = Handlers<Op, RunKernel<Op, kKernel>>;

}  // namespace jaxtap::cuda
