#include "attention/table.h"

#include "common/isa_table.h"

JAXTAP_DEFINE_TABLES(attention, amx, neon)
