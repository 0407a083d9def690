#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {

const Table& make_table() {
  static const Table table = [] {
    Table made{};
    set_forward(made);
    set_backward(made);
    set_bias_grad(made);
#if defined(__AVX512F__)
    if (__builtin_cpu_supports("avx512bf16")) set_bf16(made);
#endif
    return made;
  }();
  return table;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
