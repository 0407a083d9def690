#include "depthwise/table.h"

#include "common/isa_table.h"

JAXTAP_DEFINE_TABLE(depthwise)
