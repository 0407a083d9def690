// Defines the table() of a part: what a file of its isa/ makes for each instruction set.
#pragma once

#include "common/isa.h"

#if defined(__x86_64__)
#define JAXTAP_ON_X86(text) text
#else
#define JAXTAP_ON_X86(text)
#endif
#if defined(__aarch64__)
#define JAXTAP_ON_ARM(text) text
#else
#define JAXTAP_ON_ARM(text)
#endif

// table(isa), where AMX has the table of `of_amx`, and Arm's dot products that of `of_dot`.
#define JAXTAP_DEFINE_TABLES(part, of_amx, of_dot)                        \
  namespace jaxtap::part {                                                \
  namespace generic {                                                     \
  const Table& make_table();                                              \
  }                                                                       \
  JAXTAP_ON_ARM(namespace neon { const Table& make_table(); })            \
  JAXTAP_ON_ARM(namespace of_dot { const Table& make_table(); })          \
  JAXTAP_ON_X86(namespace avx2 { const Table& make_table(); })            \
  JAXTAP_ON_X86(namespace avx512 { const Table& make_table(); })          \
  JAXTAP_ON_X86(namespace of_amx { const Table& make_table(); })          \
  const Table& table(Isa isa) {                                           \
    switch (isa) {                                                        \
      JAXTAP_ON_ARM(case Isa::kNeon : return neon::make_table();)         \
      JAXTAP_ON_ARM(case Isa::kNeonDot : return of_dot::make_table();)    \
      JAXTAP_ON_ARM(case Isa::kNeonI8mm : return of_dot::make_table();)   \
      JAXTAP_ON_X86(case Isa::kAvx2 : return avx2::make_table();)         \
      JAXTAP_ON_X86(case Isa::kAvxVnni : return avx2::make_table();)      \
      JAXTAP_ON_X86(case Isa::kAvx512 : return avx512::make_table();)     \
      JAXTAP_ON_X86(case Isa::kAmx : return of_amx::make_table();)        \
      default:                                                            \
        return generic::make_table();                                     \
    }                                                                     \
  }                                                                       \
  }

// And table(), of the selected instruction set. AMX adds nothing but matmuls and attention, AVX-VNNI
// nothing but matmuls, and Arm's dot products nothing but matmuls and convolutions: the rest is that
// of AVX-512, AVX2 and NEON.
#define JAXTAP_DEFINE_TABLE(part)                                         \
  JAXTAP_DEFINE_TABLES(part, avx512, neon)                                \
  const jaxtap::part::Table& jaxtap::part::table() { return table(selected_isa()); }
