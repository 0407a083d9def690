// How an algorithm for a matmul is chosen.
#pragma once

#include "cuda/cublaslt.h"

namespace jaxtap::cuda {

constexpr uint32_t kLtAlignment = 16;  // of operands and results; XLA aligns to this at least

// The algorithm that cuBLASLt takes for the fastest within `limit` bytes of workspace, and what it
// needs of them. Returns whether there is one.
inline bool lt_choose(CublasLt& lt, LtHandle handle, const LtCall& call, size_t limit,
                      LtAlgorithm* algorithm, size_t* workspace,
                      uint32_t alignment = kLtAlignment) {
  OwnedPreference preference(lt);
  lt.check(lt.create_preference(preference.place()), "preparing cuBLASLt's choice");
  lt.check(lt.limit_workspace(preference.get(), limit), "preparing cuBLASLt's choice");
  lt.check(lt.set_alignment(preference.get(), alignment), "preparing cuBLASLt's choice");
  bool found = false;
  lt.check(lt.choose(handle, call, preference.get(), algorithm, workspace, &found),
           "choosing an algorithm");
  return found;
}

}  // namespace jaxtap::cuda
