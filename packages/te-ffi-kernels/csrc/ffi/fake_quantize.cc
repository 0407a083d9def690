// Handlers of fake_quantize.

#include <algorithm>
#include <cstring>
#include <vector>

#include "ffi/call.h"
#include "ffi/fake_quantize_call.h"

namespace jaxtap::ffi {
namespace {

void Warm(const FakeQuantizeConfig& config) {
  std::vector<float> x(256, 1.0f), out(x.size());
  const fakequant::Terms terms = {{0, 0}, {1, 1}, {0, 0}, {1, 1}, {0, 0}};
  std::vector<uint8_t> inside(x.size());
  float bounds[2], seen[2] = {0.0f, 0.0f};
  fakequant::Args args;
  args.options = config.options;
  args.indices = 1;
  args.numbers = static_cast<int64_t>(x.size());
  args.x = x.data();
  args.terms = &terms;
  args.seen = config.seen ? seen : nullptr;
  args.out = out.data();
  args.inside = inside.data();
  args.columns = args.numbers;
  args.bounds = bounds;
  args.observed = config.options.observe ? seen : nullptr;
  fakequant::fake_quantize(args, Parallel());
}

void Run(const FakeQuantizeCall& given, const Parallel& parallel) {
  fakequant::Args args = given.args;
  // As lax.dynamic_slice. XLA on CPU has operands in memory.
  const int64_t row = std::clamp<int64_t>(*given.row_number, 0, given.rows - 1);
  args.terms = given.terms_of_rows + row;
  if (args.observed != nullptr) {
    if (args.observed != args.seen) {
      std::memcpy(args.observed, args.seen, static_cast<size_t>(given.rows) * 2 * sizeof(float));
    }
    args.observed += 2 * row;
  }
  if (args.seen != nullptr) args.seen += 2 * row;
  fakequant::fake_quantize(args, parallel);
}

const Handlers<FakeQuantizeCall, Warm, Run> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
