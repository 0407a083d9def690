// Handlers of fake_quantize.

#include <algorithm>
#include <cstring>

#include "ffi/call.h"
#include "ffi/fake_quantize_call.h"

namespace jaxtap::ffi {
namespace {

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

const Handlers<FakeQuantizeCall, Run> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
