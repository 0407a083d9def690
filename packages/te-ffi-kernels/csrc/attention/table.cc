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
namespace amx {
const Table& make_table();
}
#endif

const Table& table(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return avx2::make_table();
    case Isa::kAvx512:
      return avx512::make_table();
    case Isa::kAmx:
      return amx::make_table();
#endif
    default:
      return generic::make_table();
  }
}

}  // namespace jaxtap::attention
