#include "common/isa.h"

#include <cstdint>
#include <cstdlib>

#include "common/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

namespace jaxtap {
namespace {

constexpr Isa kAll[] = {Isa::kGeneric, Isa::kNeon,   Isa::kNeonDot, Isa::kNeonI8mm,
                        Isa::kAvx2,    Isa::kAvxVnni, Isa::kAvx512,  Isa::kAmx};

// Whether the architecture that this was compiled for has it at all.
constexpr bool compiled_in(Isa isa) {
  if (isa == Isa::kGeneric) return true;
#if defined(__x86_64__)
  return isa >= Isa::kAvx2;
#elif defined(__aarch64__)
  return isa < Isa::kAvx2;
#else
  return false;
#endif
}

#if defined(__x86_64__)

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t sub) {
  Registers r;
  if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) return Registers();
  return r;
}

// Register states that the operating system saves: XCR0.
uint64_t saved_state() {
  if (!(cpuid(1, 0).c >> 27 & 1)) return 0;  // OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

constexpr bool all(uint64_t value, uint64_t mask) { return (value & mask) == mask; }

// Linux gives tile registers (8 KiB per thread) only to processes that ask for them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kGetPermission = 0x1022;      // ARCH_GET_XCOMP_PERM
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  uint64_t granted = 0;
  if (syscall(SYS_arch_prctl, kGetPermission, &granted) != 0) return false;
  return granted >> kTileData & 1;
#else
  return false;
#endif
}

bool has_avx_vnni() { return cpuid(7, 1).a >> 4 & 1; }

Isa detect() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  const uint64_t state = saved_state();
  const bool avx2 = all(state, 0x6) && all(one.c, 1u << 12 | 3u << 28) &&  // FMA AVX F16C
                    (seven.b >> 5 & 1);
  if (!avx2) return Isa::kGeneric;
  const bool avx512 = all(state, 0xe6) &&                   // opmask, ZMM
                      all(seven.b, 3u << 16 | 3u << 30) &&  // F DQ BW VL
                      (seven.c >> 11 & 1);                  // VNNI
  if (!avx512) return has_avx_vnni() ? Isa::kAvxVnni : Isa::kAvx2;
  const bool amx = all(state, 3u << 17) && all(seven.d, 1u << 22 | 3u << 24) &&  // BF16 TILE INT8
                   (cpuid(7, 1).a >> 5 & 1);                                     // AVX512-BF16
  return amx && may_use_tiles() ? Isa::kAmx : Isa::kAvx512;
}

#else

bool has_avx_vnni() { return false; }

#if defined(__aarch64__)

#if defined(__linux__)

// The numbers of Linux's asm/hwcap.h: older headers don't have the second.
bool has_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }    // HWCAP_ASIMDDP
bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM

#elif defined(__APPLE__)

bool has_feature(const char* name) {
  int found = 0;
  size_t size = sizeof(found);
  return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found != 0;
}

bool has_dot() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }

#else

bool has_dot() { return false; }
bool has_i8mm() { return false; }

#endif

Isa detect() {
  if (!has_dot()) return Isa::kNeon;
  return has_i8mm() ? Isa::kNeonI8mm : Isa::kNeonDot;
}

#else

Isa detect() { return Isa::kGeneric; }

#endif
#endif

Isa highest() {
  static const Isa isa = detect();
  return isa;
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kGeneric:
      return "generic";
    case Isa::kNeon:
      return "neon";
    case Isa::kNeonDot:
      return "neon_dot";
    case Isa::kNeonI8mm:
      return "neon_i8mm";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvxVnni:
      return "avx_vnni";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

bool available(Isa isa) {
  return compiled_in(isa) && isa <= highest() && (isa != Isa::kAvxVnni || has_avx_vnni());
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found;
  for (Isa isa : kAll) {
    if (available(isa)) found.push_back(isa);
  }
  return found;
}

Isa parse_isa(const std::string& text) {
  std::string allowed;
  for (Isa isa : available_isas()) {
    if (text == name(isa)) return isa;
    allowed += std::string(allowed.empty() ? "" : ", ") + name(isa);
  }
  bool known = false;
  for (Isa isa : kAll) known = known || text == name(isa);
  throw failed_precondition("instruction set \"", text, "\" is ",
                            known ? "not available on this machine" : "unknown",
                            "; this machine has ", allowed,
                            "; set JAXTAP_ISA to one of them, or unset it for the last");
}

Isa selected_isa() {
  static const std::string wanted = [] {
    const char* value = std::getenv("JAXTAP_ISA");
    return std::string(value == nullptr ? "" : value);
  }();
  static const Isa isa = wanted.empty() ? highest() : parse_isa(wanted);
  return isa;
}

}  // namespace jaxtap
