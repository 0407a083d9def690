// The order in which experts are chosen: that of the scores' bits as integers, and of equal scores
// the lower index first. What is chosen is all up to one place in this order, so that nothing has
// to be marked meanwhile.
#pragma once

#include "cuda/formats.h"

namespace jaxtap::cuda {
namespace {

struct Ranked {
  int key, at;
};

constexpr int kMostKey = 0x7fffffff;
constexpr Ranked kStart = {kMostKey, -1};             // before all
constexpr Ranked kEnd = {-kMostKey - 1, kMostKey};    // after all

JAXTAP_DEVICE int bits_and_keys(int one) { return one ^ ((one >> 31) & kMostKey); }

JAXTAP_DEVICE Ranked ranked(float score, int at) {
  return {bits_and_keys(static_cast<int>(float_bits(score))), at};
}

JAXTAP_DEVICE float score_of(const Ranked& one) {
  return bits_float(static_cast<uint32_t>(bits_and_keys(one.key)));
}

JAXTAP_DEVICE bool is_before(const Ranked& one, const Ranked& other) {
  return one.key > other.key || (one.key == other.key && one.at < other.at);
}

// The first of those of a warp's threads, all of which call this.
JAXTAP_DEVICE Ranked first_of_warp(const Ranked& mine) {
  const int key = largest_of(mine.key);
  return {key, -largest_of(mine.key == key ? -mine.at : -kMostKey)};
}

// Of those that follow `last`, the one that comes first, when all are shown.
class Next {
 public:
  __device__ __forceinline__ explicit Next(const Ranked& last) : last_(last) {}

  __device__ __forceinline__ void show(const Ranked& one) {
    if (is_before(last_, one) && is_before(one, found_)) found_ = one;
  }

  __device__ __forceinline__ Ranked found() const { return first_of_warp(found_); }

 private:
  Ranked last_, found_ = kEnd;
};

}  // namespace
}  // namespace jaxtap::cuda
