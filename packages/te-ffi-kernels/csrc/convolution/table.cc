#include "convolution/table.h"

#include "common/isa_table.h"

JAXTAP_DEFINE_TABLES(convolution, avx512, neon_dot)
