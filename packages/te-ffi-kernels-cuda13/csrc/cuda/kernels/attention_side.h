// Reading of where segments are, as the CPU's handlers read it.
#pragma once

#include "cuda/device.h"
#include "cuda/kernels/attention.h"

namespace jaxtap::cuda {
namespace {

struct Span {
  int64_t begin, length;
};

JAXTAP_DEVICE int64_t cut(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

JAXTAP_DEVICE Span span_of(const AttentionSide& side, int64_t segment) {
  const int64_t length =
      static_cast<int64_t>(side.cumulative[segment + 1]) - side.cumulative[segment];
  if (side.at == nullptr) return {segment * side.most, cut(length, side.most)};
  const int64_t begin = cut(side.at[segment], side.tokens), left = side.tokens - begin;
  return {begin, cut(length, side.most < left ? side.most : left)};
}

}  // namespace
}  // namespace jaxtap::cuda
