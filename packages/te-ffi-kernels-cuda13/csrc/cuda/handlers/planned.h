// The stages of a target whose work is planned: what `prepare` makes once per call site and device,
// since it takes time and memory, and `execute` only follows. XLA calls `prepare` and `initialize`
// before each execution; older ones call `prepare` without a device, and the plan comes with
// `initialize` then.

#pragma once

#include "cuda/handlers/handler.h"

namespace jaxtap::cuda {

// The handlers of an op, which `Op` describes for all platforms. Its last result is a workspace.
// kMake returns the std::unique_ptr<Plan> for a device, and kRun follows it.
template <class Op, class Plan, std::unique_ptr<Plan> (*kMake)(const Op&, const Call&, int),
          void (*kRun)(const Op&, const Call&, Plan&), Workspace kWorkspace = Workspace::kIs,
          Graphs kGraphs = Graphs::kYes>
class PlannedHandlers : Stages<Op, kWorkspace> {
 public:
  // Put as a static variable beside the body.
  PlannedHandlers() {
    using Common = Stages<Op, kWorkspace>;
    Targets().push_back(
        {Op::kTarget, Common::Instantiate, Common::template Initialize<Ready>, Execute, Prepare});
  }

 private:
  static Plan& PlanOf(const Call& call, SiteState& site, int device) {
    return site.keep<Plan>(device, [&] { return kMake(Op(call), call, device); });
  }

  static bool Ready(const Call& call, SiteState& site, int device) {
    Plan& plan = PlanOf(call, site, device);
    return site.warm(runtime(), private_streams(), device, call.stream, [&](Stream stream) {
      const Call there = OnStream(call, stream);
      kRun(Op(there), there, plan);
    });
  }

  static XLA_FFI_Error* Prepare(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        xffi::Ffi::Bind<xffi::ExecutionStage::kPrepare>()
            .Ctx<xffi::DeviceOrdinal>()
            .Ctx<xffi::State<SiteState>>()
            .RemainingArgs()
            .RemainingRets()
            .Attrs()
            .To([](int32_t device, SiteState* site, xffi::RemainingArgs args,
                   xffi::RemainingRets results, xffi::Dictionary attributes) {
              return Guarded(Op::kTarget, [&] {
                if (device < 0) return;
                PlanOf({nullptr, args, results, attributes, kWorkspace}, *site, device);
              });
            })
            .release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        xffi::Ffi::Bind()
            .Ctx<xffi::PlatformStream<Stream>>()
            .Ctx<xffi::DeviceOrdinal>()
            .Ctx<xffi::State<SiteState>>()
            .RemainingArgs()
            .RemainingRets()
            .Attrs()
            .To(
                [](Stream stream, int32_t device, SiteState* site, xffi::RemainingArgs args,
                   xffi::RemainingRets results, xffi::Dictionary attributes) {
                  return Guarded(Op::kTarget, [&] {
                    Plan* plan = site->kept<Plan>(device);
                    if (plan == nullptr) {
                      throw failed_precondition("device ", device, " has no plan: XLA ran the ",
                                                "call without its stages prepare and initialize");
                    }
                    const Call call = {stream, args, results, attributes, kWorkspace};
                    kRun(Op(call), call, *plan);
                  });
                },
                kTraits<kGraphs>)
            .release();
    return handler->Call(frame);
  }
};

}  // namespace jaxtap::cuda
