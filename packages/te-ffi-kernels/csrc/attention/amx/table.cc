#include "attention/isa/table.h"

#if defined(__AVX512F__)
#define JAXTAP_BASE avx512
#else  // tiles in software
#define JAXTAP_BASE generic
#endif

namespace jaxtap::attention {

namespace JAXTAP_BASE {
const Table& make_table();
}

namespace JAXTAP_ISA_NAMESPACE {

// Tiles multiply bfloat16 alone.
const Table& make_table() {
  static const Table table = [] {
    Table made = JAXTAP_BASE::make_table();
    set_forward_bf16(made);
    set_backward_bf16(made);
    return made;
  }();
  return table;
}

}  // namespace JAXTAP_ISA_NAMESPACE
}  // namespace jaxtap::attention
