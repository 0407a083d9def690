// What the files of this folder offer to each other.
#pragma once

#include "attention/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {

void set_forward(Table& table);
void set_backward(Table& table);
void set_bias_grad(Table& table);

// For processors with AVX512-BF16.
void set_bf16(Table& table);

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
