#include "router/isa/table.h"

namespace jaxtap::router::JAXTAP_ISA_NAMESPACE {

const Table& make_table() {
  static const Table table = [] {
    Table made{};
    set_forward(made);
    set_backward(made);
    set_loss(made);
    return made;
  }();
  return table;
}

}  // namespace jaxtap::router::JAXTAP_ISA_NAMESPACE
