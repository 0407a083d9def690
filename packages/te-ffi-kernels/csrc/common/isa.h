// Instruction sets: which ones this machine has, and which one to use.
#pragma once

#include <string>
#include <vector>

namespace jaxtap {

// Each needs the ones before it of its architecture, but that not all with AVX-512 have AVX-VNNI.
enum class Isa {
  kGeneric,  // plain C++, for every machine
  // Arm, in 64 bits.
  kNeon,      // which all of them have
  kNeonDot,   // SDOT: four int8 products in each lane
  kNeonI8mm,  // USDOT, and USMMLA: matrices of two by eight
  // x86.
  kAvx2,     // AVX2, FMA and F16C
  kAvxVnni,  // AVX-VNNI: int8 products in 256 bits, in processors without AVX-512
  kAvx512,   // AVX-512 F, BW, VL, DQ and VNNI
  kAmx,      // AMX tiles with int8 and bfloat16, and AVX512-BF16
};

// "generic", "neon", "neon_dot", "neon_i8mm", "avx2", "avx_vnni", "avx512" or "amx".
const char* name(Isa isa);

// Whether the processor has it, the operating system allows it and it was compiled in. The first
// question about AMX asks the kernel for the permission to use tiles, for the whole process.
bool available(Isa isa);

// All available ones, ascending.
std::vector<Isa> available_isas();

// The one to use: the highest available, or what the environment variable JAXTAP_ISA names. It is
// read at the first call alone. Throws Error (failed precondition) for a name that is unknown or
// not available, at each call.
Isa selected_isa();

// Of a name. Throws Error (failed precondition), which lists the available ones.
Isa parse_isa(const std::string& text);

}  // namespace jaxtap
