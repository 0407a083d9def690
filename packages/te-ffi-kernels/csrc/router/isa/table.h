// What the files of this folder offer to each other.
#pragma once

#include "router/table.h"

namespace jaxtap::router::JAXTAP_ISA_NAMESPACE {

void set_forward(Table& table);
void set_backward(Table& table);
void set_loss(Table& table);

}  // namespace jaxtap::router::JAXTAP_ISA_NAMESPACE
