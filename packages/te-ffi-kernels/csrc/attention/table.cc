#include "attention/table.h"

#include "common/isa.h"

namespace jaxtap::attention {

namespace generic {
const Table& make_table();
}
#if defined(__x86_64__)
namespace avx2 {
const Table& make_table();
}
namespace avx512 {
const Table& make_table();
}
#endif

const Table& table() {
  switch (selected_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return avx2::make_table();
    case Isa::kAvx512:
    case Isa::kAmx:
      return avx512::make_table();
#endif
    default:
      return generic::make_table();
  }
}

}  // namespace jaxtap::attention
