// Handlers of topk.

#include "ffi/call.h"
#include "ffi/topk_call.h"

namespace jaxtap::ffi {
namespace {

void Run(const TopKCall& given, const Parallel& parallel) { router::topk(given.args, parallel); }

const Handlers<TopKCall, nullptr, Run> kHandlers(
    "It compares integers, with one loop for all instruction sets");

}  // namespace
}  // namespace jaxtap::ffi
