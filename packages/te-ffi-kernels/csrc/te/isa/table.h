// What the files of this folder offer to each other.
#pragma once

#include "te/table.h"

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {

void set_transpose(Table& table);
void set_matmul(Table& table);

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
