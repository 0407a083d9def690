// Activations, and their gradients, as numbers that kernels compute where they need them.
#pragma once

#include "cuda/formats.h"
#include "cuda/kernels/activation.h"
#include "cuda/kernels/activation_functions.h"
#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

// What sources have alike. `Self` computes numbers of a row: run<kCount>(row, col, left, wide,
// out), of which `left` exist; out is zeros beyond them.
template <class Self, class Of>
struct ActivationSource {
  using Format = Of;
  using Type = typename Of::Type;
  const Type *dz, *x;
  int64_t n;  // columns of one part
  Curve curve;
  bool rounded;  // to the dtype

  // Whether `count` numbers may be read in a vector.
  bool wide(int count = kPart) const {
    return n % count == 0 && aligned(sizeof(Type) * static_cast<size_t>(count), x, dz);
  }

  __device__ __forceinline__ void part(const TileArgs& args, const Place& place,
                                       float (&out)[kPart][kPart]) const {
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) {
      const int64_t left = place.row + i < args.rows ? args.cols - place.col : 0;
      static_cast<const Self*>(this)->run(place.row + i, place.col, left, args.wide, out[i]);
      finish(left, out[i]);
    }
  }

  __device__ __forceinline__ float number(const TileArgs&, int64_t row, int64_t col) const {
    float out[1];
    static_cast<const Self*>(this)->run(row, col, 1, false, out);
    finish(1, out);
    return out[0];
  }

 private:
  template <int kCount>
  __device__ __forceinline__ void finish(int64_t left, float (&out)[kCount]) const {
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (rounded) out[i] = Of::load(Of::store(out[i]));
      if (i >= left) out[i] = 0.0f;
    }
  }
};

// f(x), or f(a) * b.
template <class Of, bool kGated>
struct Activated : ActivationSource<Activated<Of, kGated>, Of> {
  template <int kCount>
  __device__ __forceinline__ void run(int64_t row, int64_t col, int64_t left, bool wide,
                                      float (&out)[kCount]) const {
    const auto* from = this->x + row * this->n * (kGated ? 2 : 1) + col;
    float a[kCount], b[kCount];
    load<Of>(from, left, wide, a);
    if constexpr (kGated) load<Of>(from + this->n, left, wide, b);
    by_kind(this->curve, [&](auto of) {
      JAXTAP_UNROLL
      for (int i = 0; i < kCount; ++i) {
        out[i] = point<decltype(of)::value>(a[i], this->curve).value;
        if constexpr (kGated) out[i] *= gate(b[i], this->curve).value;
      }
    });
  }
};

// The derivative with respect to x.
template <class Of>
struct Derived : ActivationSource<Derived<Of>, Of> {
  template <int kCount>
  __device__ __forceinline__ void run(int64_t row, int64_t col, int64_t left, bool wide,
                                      float (&out)[kCount]) const {
    const int64_t at = row * this->n + col;
    float dz[kCount], x[kCount];
    load<Of>(this->dz + at, left, wide, dz);
    load<Of>(this->x + at, left, wide, x);
    by_kind(this->curve, [&](auto of) {
      JAXTAP_UNROLL
      for (int i = 0; i < kCount; ++i) {
        out[i] = dz[i] * point<decltype(of)::value>(x[i], this->curve).slope;
      }
    });
  }
};

// The derivatives with respect to both parts of x, of which a row has one after the other.
template <class Of>
struct DerivedPair : ActivationSource<DerivedPair<Of>, Of> {
  template <int kCount>
  __device__ __forceinline__ void run(int64_t row, int64_t col, int64_t left, bool wide,
                                      float (&out)[kCount]) const {
    const int64_t n = this->n;
    const auto *slopes = this->dz + row * n, *first = this->x + row * 2 * n;
    float dz[kCount], a[kCount], b[kCount];
    // Vectors are of one part.
    if (wide && left >= kCount) {
      const int64_t at = col < n ? col : col - n;
      load<Of>(slopes + at, left, wide, dz);
      load<Of>(first + at, left, wide, a);
      load<Of>(first + n + at, left, wide, b);
    } else {
      JAXTAP_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const int64_t at = col + i < n ? col + i : col + i - n;
        dz[i] = i < left ? Of::load(slopes[at]) : 0.0f;
        a[i] = i < left ? Of::load(first[at]) : 0.0f;
        b[i] = i < left ? Of::load(first[n + at]) : 0.0f;
      }
    }
    by_kind(this->curve, [&](auto of) {
      JAXTAP_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const Point one = point<decltype(of)::value>(a[i], this->curve);
        const Point other = gate(b[i], this->curve);
        out[i] = col + i < n ? dz[i] * one.slope * other.value : dz[i] * one.value * other.slope;
      }
    });
  }
};

// Of a source's dtype.
template <class Source>
Source source_of(const Activation& args, const Quantize& outputs) {
  using Type = typename Source::Type;
  Source source = {};
  source.dz = static_cast<const Type*>(args.dz);
  source.x = static_cast<const Type*>(args.x);
  source.n = args.cols;
  source.curve = curve_of(args.function, args.params);
  source.rounded = outputs.scaling == te::Scaling::kCurrentTensor;
  return source;
}

// Calls run(source) for what is computed in each direction.
template <class Of, class Run>
void forward_source(const Activation& args, const Quantize& outputs, Run&& run) {
  if (args.gated) return run(source_of<Activated<Of, true>>(args, outputs));
  return run(source_of<Activated<Of, false>>(args, outputs));
}

template <class Of, class Run>
void backward_source(const Activation& args, const Quantize& outputs, Run&& run) {
  if (args.gated) return run(source_of<DerivedPair<Of>>(args, outputs));
  return run(source_of<Derived<Of>>(args, outputs));
}

}  // namespace
}  // namespace jaxtap::cuda
