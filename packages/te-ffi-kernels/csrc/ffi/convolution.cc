// Handlers of convolutions with packed weights.

#include <vector>

#include "common/isa.h"
#include "depthwise/depthwise.h"
#include "ffi/call.h"
#include "ffi/convolution_call.h"
#include "matmul/pack.h"

namespace jaxtap::ffi {
namespace {

template <class Op>
void convolve(const convolution::Args& args, const Parallel& parallel) {
  if constexpr (Op::kQuantizes) {
    convolution::convolve(args, parallel, selected_isa());
  } else {
    depthwise::convolve(args, parallel, selected_isa());
  }
}

// Runs the kernel once on an image of one element, so that its code is in memory, and picks the
// instruction set (for AMX, this asks the system for permission).
template <class Op>
void Warm(const typename Op::Config& config) {
  warm_panel_checks();
  const bool depthwise = !Op::kQuantizes || (config.groups > 1 && config.groups == config.n);
  PanelLayout layout = config.layout;
  layout.k = depthwise ? 1 : 4;
  const int64_t n = depthwise ? 16 : layout.columns();
  const std::vector<int8_t> qvalues(static_cast<size_t>(layout.k * n), 1);
  const std::vector<uint8_t> scales(static_cast<size_t>(layout.scale_bytes()), 0);
  std::vector<uint8_t> buffer(static_cast<size_t>(layout.panel_bytes()));
  pack(qvalues.data(), scales.data(), n, layout, buffer.data(), 1, layout.panel_bytes(),
       Parallel());
  const std::vector<float> x(16, 1.0f);
  std::vector<float> y(static_cast<size_t>(n));
  convolution::Args args;
  args.x = x.data();
  args.images = 1;
  args.channels = depthwise ? n : layout.k;
  args.groups = depthwise ? n : 1;
  args.weights = {buffer.data(), 1, layout.panel_bytes(), n, layout};
  args.y = y.data();
  const float scale = 1.0f;
  if (config.to_int8) args.y_scale = &scale;
  convolve<Op>(args, Parallel());
}

template <class Op>
void Run(const Op& given, const Parallel& parallel) {
  convolve<Op>(given.args, parallel);
}

template <class Op>
using Convolving = Handlers<Op, Warm<Op>, Run<Op>>;

const Convolving<ConvolutionCall<kConvW8A8, 8>> kW8A8;
const Convolving<ConvolutionCall<kConvW4A8, 4>> kW4A8;
const Convolving<ConvolutionCall<kConvW8A16, 8, false>> kW8A16;
const Convolving<ConvolutionCall<kConvW4A16, 4, false>> kW4A16;

}  // namespace
}  // namespace jaxtap::ffi
