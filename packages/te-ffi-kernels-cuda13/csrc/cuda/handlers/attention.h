// The plans that attention's handlers and the module share.
#pragma once

#include "cuda/attention/plans.h"

namespace jaxtap::cuda {

DnnPlans& AttentionPlans();

}  // namespace jaxtap::cuda
