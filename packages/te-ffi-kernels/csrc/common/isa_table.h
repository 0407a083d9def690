// Defines the table() of a part: what its isa/table.cc makes for the selected instruction set.
#pragma once

#include "common/isa.h"

#if defined(__x86_64__)
// AMX adds nothing but matmuls: the rest is AVX-512's.
#define JAXTAP_DEFINE_TABLE(part)              \
  namespace jaxtap::part {                     \
  namespace generic {                          \
  const Table& make_table();                   \
  }                                            \
  namespace avx2 {                             \
  const Table& make_table();                   \
  }                                            \
  namespace avx512 {                           \
  const Table& make_table();                   \
  }                                            \
  const Table& table() {                       \
    switch (selected_isa()) {                  \
      case Isa::kGeneric:                      \
        return generic::make_table();          \
      case Isa::kAvx2:                         \
        return avx2::make_table();             \
      case Isa::kAvx512:                       \
      case Isa::kAmx:                          \
        return avx512::make_table();           \
    }                                          \
    return generic::make_table();              \
  }                                            \
  }
#else
#define JAXTAP_DEFINE_TABLE(part)                          \
  namespace jaxtap::part {                                 \
  namespace generic {                                      \
  const Table& make_table();                               \
  }                                                        \
  const Table& table() {                                  \
    selected_isa(); /* throws for a name that is none */   \
    return generic::make_table();                          \
  }                                                        \
  }
#endif
