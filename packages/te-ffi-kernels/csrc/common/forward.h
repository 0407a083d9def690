// Names of what many headers only pass on, and whose own headers are long.
#pragma once

namespace jaxtap {

class Parallel;    // common/parallel.h
enum class Isa;    // common/isa.h
Isa selected_isa();

}  // namespace jaxtap
