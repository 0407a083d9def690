// What the files of this folder offer to each other.
#pragma once

#include "attention/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {

void set_forward(Table& table);
void set_backward(Table& table);
void set_bias_grad(Table& table);

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
