// The largest numbers of rows, and where they are.
#pragma once

#include "cuda/runtime.h"
#include "router/topk.h"

namespace jaxtap::cuda {

using router::TopK;

// The largest k that there is a kernel for.
constexpr int64_t kMostTopK = 1024;

void topk(const TopK& args, Stream stream);

}  // namespace jaxtap::cuda
