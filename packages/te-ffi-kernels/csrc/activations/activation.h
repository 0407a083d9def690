// Which activation, with Transformer Engine's numbers.
#pragma once

#include <cstdint>

#include "activations/table.h"
#include "common/error.h"

namespace jaxtap::activations {

struct Activation {
  Function function;
  bool gated;
};

// Throws for a number without a meaning.
inline Activation activation_of(int64_t number) {
  constexpr Activation kAll[] = {
      {Function::kGelu, false},        {Function::kGelu, true},
      {Function::kSigmoid, true},      {Function::kSilu, false},
      {Function::kSilu, true},         {Function::kRelu, false},
      {Function::kRelu, true},         {Function::kQuickGelu, false},
      {Function::kQuickGelu, true},    {Function::kSquaredRelu, false},
      {Function::kSquaredRelu, true},  {Function::kClampedSilu, true},
  };
  constexpr int64_t kCount = sizeof(kAll) / sizeof(kAll[0]);
  if (number < 0 || number >= kCount) {
    throw invalid_argument("act_enum must be from 0 (gelu) to ", kCount - 1, " (clamped swiglu), "
                           "got ", number);
  }
  return kAll[number];
}

}  // namespace jaxtap::activations
