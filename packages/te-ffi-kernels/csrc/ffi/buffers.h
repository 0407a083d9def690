// Reading the buffers of a call, with errors that name the argument.

#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "common/dtype.h"
#include "common/error.h"
#include "xla/ffi/api/c_api.h"

namespace jaxtap::ffi {

// The dtype of ours for one of XLA's. Throws for those that no kernel has.
inline DType FromXla(XLA_FFI_DataType type, const char* argument) {
  switch (type) {
    case XLA_FFI_DataType_F64: return DType::F64;
    case XLA_FFI_DataType_F32: return DType::F32;
    case XLA_FFI_DataType_BF16: return DType::BF16;
    case XLA_FFI_DataType_F16: return DType::F16;
    case XLA_FFI_DataType_F8E4M3FN: return DType::F8E4M3FN;
    case XLA_FFI_DataType_F8E5M2: return DType::F8E5M2;
    case XLA_FFI_DataType_F8E8M0FNU: return DType::F8E8M0;
    case XLA_FFI_DataType_S64: return DType::S64;
    case XLA_FFI_DataType_S32: return DType::S32;
    case XLA_FFI_DataType_S16: return DType::S16;
    case XLA_FFI_DataType_S8: return DType::S8;
    case XLA_FFI_DataType_U64: return DType::U64;
    case XLA_FFI_DataType_U32: return DType::U32;
    case XLA_FFI_DataType_U16: return DType::U16;
    case XLA_FFI_DataType_U8: return DType::U8;
    case XLA_FFI_DataType_PRED: return DType::PRED;
    default:
      throw invalid_argument(argument, " has XLA's dtype number ", static_cast<int>(type),
                             ", which no kernel takes");
  }
}

// The sizes of axes.
struct Shape {
  const int64_t* sizes;
  size_t rank;

  size_t size() const { return rank; }
  int64_t operator[](size_t axis) const { return sizes[axis]; }
};

// A buffer, its dtype known.
struct Array {
  const char* name;
  void* data;
  DType dtype;
  Shape shape;

  int64_t rank() const { return static_cast<int64_t>(shape.size()); }
  int64_t size() const { return Product(0, rank()); }

  // The product of the dimensions from `begin` to before `end`.
  int64_t Product(int64_t begin, int64_t end) const {
    int64_t product = 1;
    for (int64_t i = begin; i < end; ++i) product *= shape[i];
    return product;
  }

  // As "float32[8, 64]".
  std::string Text() const {
    std::ostringstream text;
    text << jaxtap::name(dtype) << '[';
    for (size_t i = 0; i < shape.size(); ++i) text << (i == 0 ? "" : ", ") << shape[i];
    text << ']';
    return text.str();
  }

  const Array& NeedRank(int64_t wanted) const {
    if (rank() != wanted) {
      throw invalid_argument(name, " must have ", wanted, " axes, got ", Text());
    }
    return *this;
  }

  const Array& NeedDtype(std::initializer_list<DType> wanted) const {
    for (DType one : wanted) {
      if (dtype == one) return *this;
    }
    std::ostringstream names;
    for (const DType* one = wanted.begin(); one != wanted.end(); ++one) {
      names << (one == wanted.begin() ? "" : ", ") << jaxtap::name(*one);
    }
    throw invalid_argument(name, " must be of: ", names.str(), ", got ", Text());
  }

  // `meaning` says what the sizes come from.
  const Array& NeedShape(std::initializer_list<int64_t> wanted, const char* meaning) const {
    bool same = rank() == static_cast<int64_t>(wanted.size());
    for (size_t i = 0; same && i < wanted.size(); ++i) same = shape[i] == wanted.begin()[i];
    if (same) return *this;
    std::ostringstream sizes;
    for (const int64_t* one = wanted.begin(); one != wanted.end(); ++one) {
      sizes << (one == wanted.begin() ? "" : ", ") << *one;
    }
    throw invalid_argument(name, " must have the shape [", sizes.str(), "], ", meaning, ", got ",
                           Text());
  }
};

inline Array Read(const char* name, const XLA_FFI_Buffer& buffer) {
  return {name, buffer.data, FromXla(buffer.dtype, name),
          {buffer.dims, static_cast<size_t>(buffer.rank)}};
}

}  // namespace jaxtap::ffi
