#include "te/isa/table.h"

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {

const Table& make_table() {
  static const Table table = [] {
    Table made{};
    set_conversions(made);
    set_encoders(made);
    set_rows(made);
    set_transpose(made);
    set_matmul(made);
    return made;
  }();
  return table;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
