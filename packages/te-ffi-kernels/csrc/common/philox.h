// Philox 4x32-10, the counter-based generator of Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3": random words as a function of a counter and a key.
//
// Internal linkage: files that are compiled for different instruction sets must not share one copy.
#pragma once

#include <cstdint>

#include "common/convert.h"

namespace jaxtap {

// Replaces the counter by four random words.
JAXTAP_INLINE void philox(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t key0,
                          uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t second = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

}  // namespace jaxtap
