// Handlers of dbias_quantize.

#include "cuda/kernels/quantize.h"

#include "cuda/handlers/sums.h"
#include "ffi/te_quantize_call.h"

namespace jaxtap::cuda {
namespace {

void Run(const ffi::QuantizeCall& given, const Call& call) {
  call.Clear(given.Unwanted());
  Quantize args;
  given.Set(args);
  args.scale = static_cast<const float*>(given.scale.data);
  args.amax = static_cast<const float*>(given.amax.data);
  args.updated_amax = static_cast<float*>(given.outputs.updated_amax.data);
  const int64_t summed = args.sums == nullptr ? 0 : args.cols;
  args.parts = PartsOfSums(call, args.rows, summed, 1);
  quantize(args, call.stream);
}

const Handlers<ffi::QuantizeCall, Run, Workspace::kIs> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
