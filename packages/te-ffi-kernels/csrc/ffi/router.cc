// Handlers of the router: with Transformer Engine's operands, attributes and results, and its number
// 2 (sqrtsoftplus) of score functions beside.

#include <vector>

#include "ffi/attributes.h"
#include "ffi/buffers.h"
#include "ffi/floats.h"
#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_arguments.h"
#include "ffi/threads.h"
#include "router/router.h"

namespace jaxtap::ffi {
namespace {

using router::MapFormat;
using router::Options;
using router::Score;

constexpr char kForward[] = "te_ffi_kernels.fused_topk_with_score_function_forward";
constexpr char kBackward[] = "te_ffi_kernels.fused_topk_with_score_function_backward";

// Without the number of experts, which operands have.
Options OptionsOf(const xffi::Dictionary& attributes, bool forward) {
  Options options;
  options.topk = NeedAttribute<int64_t>(attributes, "topk");
  options.score = static_cast<Score>(NeedAttribute<int64_t>(attributes, "score_function"));
  options.dense = NeedAttribute<int64_t>(attributes, "compute_aux_scores") != 0;
  options.format =
      static_cast<MapFormat>(NeedAttribute<int64_t>(attributes, "routing_map_format"));
  const bool before = NeedAttribute<int64_t>(attributes, "use_pre_softmax") != 0;
  const double scaling = NeedAttribute<double>(attributes, "scaling_factor");
  if (!options.dense) {
    options.pre_softmax = before;
    options.scaling = static_cast<float>(scaling);
  }
  if (forward) {
    const auto groups = NeedAttribute<int64_t>(attributes, "num_groups");
    const auto group_topk = NeedAttribute<int64_t>(attributes, "group_topk");
    if (!options.dense && group_topk > 0) {
      options.groups = groups;
      options.group_topk = group_topk;
    }
  }
  router::check(options);
  return options;
}

int64_t WithExperts(Options& options, const Array& array) {
  if (array.rank() < 1) {
    throw invalid_argument(array.name, " is ", array.Text(), ", and must be [tokens, experts]");
  }
  options.experts = array.shape[array.rank() - 1];
  router::check_experts(options);
  return array.Product(0, array.rank() - 1);
}

void NeedMap(const Array& map, const Options& options, int64_t tokens) {
  if (options.format == MapFormat::kBits) {
    map.NeedDtype({DType::U8});
  } else {
    map.NeedDtype({DType::PRED, DType::U8});
  }
  NeedSize(map, tokens * router::map_bytes(options.format, options.experts),
           options.format == MapFormat::kBits ? "a bit for each expert" : "one for each expert");
}

// As many experts as the options ask for, for warm-ups.
void SomeExperts(Options& options) {
  constexpr int64_t kMost = 1 << 12;
  if (options.topk > kMost || options.groups > kMost) {  // more than a warm-up is worth
    options.topk = 8;
    options.groups = options.group_topk = 0;
  }
  const int64_t each =
      options.group_topk > 0 ? (options.topk / options.group_topk + 15) / 16 * 16 : 16;
  options.experts =
      options.group_topk > 0 ? each * options.groups : (options.topk + 15) / 16 * 16;
}

void WarmForward(Options options) {
  SomeExperts(options);
  const auto size = static_cast<size_t>(options.experts);
  std::vector<float> logits(size), probs(size), saved(size);
  std::vector<uint8_t> map(size);
  router::Forward args;
  args.options = options;
  args.tokens = 1;
  args.logits = logits.data();
  args.probs = probs.data();
  args.map = map.data();
  args.saved = saved.data();
  router::forward(args, Parallel());
}

struct Bias {};

void Forward(Options options, xffi::ThreadPool pool, const Array& logits, const Array& bias,
             const Array& probs, const Array& map, const Array& saved) {
  router::Forward args;
  NeedFloat(logits);
  args.tokens = WithExperts(options, logits);
  args.options = options;
  args.dtype = te::float_of(logits.dtype);
  args.logits = logits.data;
  if (!options.dense && bias.size() != 0) {
    NeedSize(NeedFloat(bias), options.experts, "one for each expert, or none");
    if (options.score == Score::kSoftmax) {
      throw invalid_argument("expert_bias is ", bias.Text(),
                             ", and must be empty: softmax has none");
    }
    args.bias = ToFloats<Bias>(bias);
  }
  probs.NeedDtype({logits.dtype});
  NeedSize(probs, logits.size(), "as logits");
  NeedMap(map, options, args.tokens);
  NeedSize(saved.NeedDtype({DType::F32}), logits.size(), "as logits");
  args.probs = probs.data;
  args.map = static_cast<uint8_t*>(map.data);
  args.saved = static_cast<float*>(saved.data);
  XlaScheduler scheduler(pool);
  router::forward(args, Parallel(scheduler));
}

void WarmBackward(Options options) {
  SomeExperts(options);
  const auto size = static_cast<size_t>(options.experts);
  std::vector<float> grad(size), saved(size), out(size);
  std::vector<uint8_t> map(size);
  router::Backward args;
  args.options = options;
  args.tokens = 1;
  args.map = map.data();
  args.saved = saved.data();
  args.grad = grad.data();
  args.out = out.data();
  router::backward(args, Parallel());
}

void Backward(Options options, xffi::ThreadPool pool, const Array& map, const Array& saved,
              const Array& grad, const Array& out) {
  router::Backward args;
  NeedFloat(grad);
  args.tokens = WithExperts(options, grad);
  args.options = options;
  args.dtype = te::float_of(grad.dtype);
  if (!options.dense) NeedMap(map, options, args.tokens);
  NeedSize(saved.NeedDtype({DType::F32}), grad.size(), "as grad_probs");
  NeedSize(out.NeedDtype({grad.dtype}), grad.size(), "as grad_probs");
  args.map = static_cast<const uint8_t*>(map.data);
  args.saved = static_cast<const float*>(saved.data);
  args.grad = grad.data;
  args.out = out.data;
  XlaScheduler scheduler(pool);
  router::backward(args, Parallel(scheduler));
}

using In = xffi::AnyBuffer;
using Out = xffi::Result<xffi::AnyBuffer>;

XLA_FFI_DEFINE_HANDLER(kInstantiateForward,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kForward,
                                       [&] { WarmForward(OptionsOf(attributes, true)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kExecuteForward,
                       [](xffi::ThreadPool pool, In logits, In bias, Out probs, Out map, Out saved,
                          xffi::Dictionary attributes) {
                         return Guarded(kForward, [&] {
                           Forward(OptionsOf(attributes, true), pool, Read("logits", logits),
                                   Read("expert_bias", bias), Read("probs", probs),
                                   Read("routing_map", map), Read("intermediate_output", saved));
                         });
                       },
                       xffi::Ffi::Bind()
                           .Ctx<xffi::ThreadPool>()
                           .Arg<In>()  // logits
                           .Arg<In>()  // expert_bias
                           .Ret<In>()  // probs
                           .Ret<In>()  // routing_map
                           .Ret<In>()  // intermediate_output
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(kInstantiateBackward,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kBackward,
                                       [&] { WarmBackward(OptionsOf(attributes, false)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kExecuteBackward,
                       [](xffi::ThreadPool pool, In map, In saved, In grad, Out out,
                          xffi::Dictionary attributes) {
                         return Guarded(kBackward, [&] {
                           Backward(OptionsOf(attributes, false), pool, Read("routing_map", map),
                                    Read("intermediate_output", saved), Read("grad_probs", grad),
                                    Read("grad_logits", out));
                         });
                       },
                       xffi::Ffi::Bind()
                           .Ctx<xffi::ThreadPool>()
                           .Arg<In>()  // routing_map
                           .Arg<In>()  // intermediate_output
                           .Arg<In>()  // grad_probs
                           .Ret<In>()  // grad_logits
                           .Attrs());

const Registration kForwardRegistration({kForward, kInstantiateForward, kExecuteForward});
const Registration kBackwardRegistration({kBackward, kInstantiateBackward, kExecuteBackward});

}  // namespace
}  // namespace jaxtap::ffi
