// Element types of arrays.
#pragma once

#include <cstddef>

namespace jaxtap {

enum class DType {
  F64,
  F32,
  BF16,
  F16,
  F8E4M3FN,
  F8E5M2,
  F8E8M0,
  S64,
  S32,
  S16,
  S8,
  S4,  // one per byte
  U64,
  U32,
  U16,
  U8,
  U4,  // one per byte
  PRED,
};

// Bytes that an element takes in memory.
constexpr size_t byte_size(DType type) {
  switch (type) {
    case DType::F64:
    case DType::S64:
    case DType::U64:
      return 8;
    case DType::F32:
    case DType::S32:
    case DType::U32:
      return 4;
    case DType::BF16:
    case DType::F16:
    case DType::S16:
    case DType::U16:
      return 2;
    default:
      return 1;
  }
}

// The name that JAX gives the dtype.
constexpr const char* name(DType type) {
  switch (type) {
    case DType::F64:
      return "float64";
    case DType::F32:
      return "float32";
    case DType::BF16:
      return "bfloat16";
    case DType::F16:
      return "float16";
    case DType::F8E4M3FN:
      return "float8_e4m3fn";
    case DType::F8E5M2:
      return "float8_e5m2";
    case DType::F8E8M0:
      return "float8_e8m0fnu";
    case DType::S64:
      return "int64";
    case DType::S32:
      return "int32";
    case DType::S16:
      return "int16";
    case DType::S8:
      return "int8";
    case DType::S4:
      return "int4";
    case DType::U64:
      return "uint64";
    case DType::U32:
      return "uint32";
    case DType::U16:
      return "uint16";
    case DType::U8:
      return "uint8";
    case DType::U4:
      return "uint4";
    case DType::PRED:
      return "bool";
  }
  return "unknown";
}

inline bool is_float(DType type) {
  return type == DType::F32 || type == DType::BF16 || type == DType::F16;
}

}  // namespace jaxtap
