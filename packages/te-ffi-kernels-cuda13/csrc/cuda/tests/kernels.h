// What tests of kernels share: arrays of exactly their size, and what is the same or near.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#if defined(JAXTAP_ON_DEVICE)
#include "cuda/tests/on_device.h"
#endif
#include "te/modes.h"
#include "tests/weights.h"

namespace jaxtap::testing {

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline int64_t bytes_of(DType dtype) { return static_cast<int64_t>(byte_size(dtype)); }

// An offset at which no vector can be read, or 0.
inline int64_t misalign(DType dtype, bool wide) { return wide ? 0 : bytes_of(dtype); }

// Fills an array with NaN: of floats, and of quantized values that have one. Nothing that is read
// of it before it's written, even if only to be multiplied with 0, goes unnoticed.
inline void fill_nan(Buffer& buffer) {
  std::memset(buffer.get(), 0xFF, static_cast<size_t>(buffer.size()));
#if defined(JAXTAP_ON_DEVICE)
  cuda::on_device::mark_unwritten(buffer.allocation());
#endif
}

inline Buffer numbers(int64_t count, DType dtype, bool wide, float size, std::mt19937& random) {
  Buffer buffer(count * bytes_of(dtype), misalign(dtype, wide));
  std::normal_distribution<float> normal(0.0f, size);
  for (int64_t i = 0; i < count; ++i) set_element(buffer.get(), dtype, i, normal(random));
  return buffer;
}

inline void spoil(Buffer& buffer, int64_t count, DType dtype, std::mt19937& random) {
  for (float bad : {kNan, kInfinity, -kInfinity, -0.0f}) {
    if (count != 0) {
      set_element(buffer.get(), dtype, static_cast<int64_t>(random() % static_cast<uint64_t>(count)),
                  bad);
    }
  }
}

inline bool same(const Buffer& one, const Buffer& other) {
  return one.size() == other.size() &&
         (one.size() == 0 ||
          std::memcmp(one.get(), other.get(), static_cast<size_t>(one.size())) == 0);
}

// What quantization gives.
struct Results {
  Results(int64_t rows, int64_t cols, te::Scaling scaling, DType dtype, bool wide)
      : qvalues(rows * cols, wide ? 0 : 1),
        colwise(rows * cols, wide ? 0 : 3),
        scales(scaling == te::Scaling::kMx ? rows * cols / 32
                                       : 4 * (scaling == te::Scaling::kChannel ? rows : 1),
               scaling == te::Scaling::kMx ? 1 : 4),
        colwise_scales(scaling == te::Scaling::kMx ? rows * cols / 32
                                              : 4 * (scaling == te::Scaling::kChannel ? cols : 1),
                      scaling == te::Scaling::kMx ? 1 : 4),
        sums(cols * bytes_of(dtype), misalign(dtype, wide)),
        amax(4, 4),
        scale(4, 4) {}
  Buffer qvalues, colwise, scales, colwise_scales, sums, amax;
  Buffer scale;  // what is given, where kernels read it
};

// Whether two arrays are near: both are rounded to the dtype, from sums in another order.
inline bool near(const Buffer& found, const Buffer& wanted, DType dtype, int64_t count) {
  const double step = dtype == DType::F32 ? 2e-6 : dtype == DType::F16 ? 1e-3 : 8e-3;
  for (int64_t i = 0; i < count; ++i) {
    const double one = element(found.get(), dtype, i), other = element(wanted.get(), dtype, i);
    if (std::isnan(one) != std::isnan(other)) return false;
    if (std::isnan(one)) continue;
    if ((one == 0) != (other == 0) && std::fabs(other) > 1e-7) return false;
    if (std::fabs(one - other) > step * std::fabs(other) + 2e-6) return false;
  }
  return true;
}

}  // namespace jaxtap::testing
