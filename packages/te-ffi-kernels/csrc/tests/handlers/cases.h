// Calls of handlers: one that works, with what it gives, and those that are refused.
#pragma once

#include <cmath>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "common/convert.h"
#include "tests/check.h"
#include "tests/handlers/fake_xla.h"

namespace jaxtap::testing {

constexpr XLA_FFI_DataType kF32 = XLA_FFI_DataType_F32, kBF16 = XLA_FFI_DataType_BF16,
                           kF16 = XLA_FFI_DataType_F16, kS8 = XLA_FFI_DataType_S8,
                           kS32 = XLA_FFI_DataType_S32, kU8 = XLA_FFI_DataType_U8,
                           kU32 = XLA_FFI_DataType_U32, kPred = XLA_FFI_DataType_PRED,
                           kE4M3 = XLA_FFI_DataType_F8E4M3FN, kE5M2 = XLA_FFI_DataType_F8E5M2;

// A change to a call, and part of what is said of it then.
struct Bad {
  std::function<void(Program&)> change;
  std::string part;
};

struct Case {
  Program program;
  // Checks the results.
  std::function<void(const Program&)> expect;
  std::vector<Bad> bad;
  std::set<std::string> optional = {};  // attributes that may be left out
};

inline std::vector<Case (*)()>& cases() {
  static std::vector<Case (*)()> all;
  return all;
}

struct Registered {
  explicit Registered(Case (*make)()) { cases().push_back(make); }
};

// Numbers and the dtypes that hold them.

inline double number(const Tensor& t, int64_t i) {
  switch (t.dtype) {
    case XLA_FFI_DataType_F32: return static_cast<double>(t.as<float>()[i]);
    case XLA_FFI_DataType_BF16: return static_cast<double>(bf16_to_f32(t.as<uint16_t>()[i]));
    case XLA_FFI_DataType_F16: return static_cast<double>(f16_to_f32(t.as<uint16_t>()[i]));
    case XLA_FFI_DataType_S8: return t.as<int8_t>()[i];
    case XLA_FFI_DataType_S32: return t.as<int32_t>()[i];
    default: return t.as<uint8_t>()[i];
  }
}

inline void set_number(Tensor& t, int64_t i, double value) {
  const auto x = static_cast<float>(value);
  switch (t.dtype) {
    case XLA_FFI_DataType_F32: t.as<float>()[i] = x; break;
    case XLA_FFI_DataType_BF16: t.as<uint16_t>()[i] = f32_to_bf16(x); break;
    case XLA_FFI_DataType_F16: t.as<uint16_t>()[i] = f32_to_f16(x); break;
    case XLA_FFI_DataType_S8: t.as<int8_t>()[i] = static_cast<int8_t>(value); break;
    case XLA_FFI_DataType_S32: t.as<int32_t>()[i] = static_cast<int32_t>(value); break;
    default: t.as<uint8_t>()[i] = static_cast<uint8_t>(value);
  }
}

inline Tensor normal(std::vector<int64_t> dims, XLA_FFI_DataType dtype = kF32) {
  static std::mt19937 random(5);
  std::normal_distribution<double> draw(0.0, 1.0);
  Tensor made(dtype, std::move(dims));
  for (int64_t i = 0; i < made.size(); ++i) set_number(made, i, draw(random));
  return made;
}

inline Tensor filled(XLA_FFI_DataType dtype, std::vector<int64_t> dims, double value) {
  Tensor made(dtype, std::move(dims));
  for (int64_t i = 0; i < made.size(); ++i) set_number(made, i, value);
  return made;
}

inline Tensor values(XLA_FFI_DataType dtype, const std::vector<double>& numbers) {
  Tensor made(dtype, {static_cast<int64_t>(numbers.size())});
  for (int64_t i = 0; i < made.size(); ++i) {
    set_number(made, i, numbers[static_cast<size_t>(i)]);
  }
  return made;
}

// Whether all numbers are `wanted(i)`, but for `slack` times 1 + its magnitude.
inline void expect_close(const Tensor& found, const char* what,
                         const std::function<double(int64_t)>& wanted, double slack = 1e-5) {
  bool good = true;
  for (int64_t i = 0; i < found.size(); ++i) {
    const double one = wanted(i);
    good = good && std::fabs(number(found, i) - one) <= slack * (1 + std::fabs(one));
  }
  CHECK_THAT(good, what);
}

// Changes that many calls share.

inline std::function<void(Program&)> set(const char* name, Attribute value) {
  return [=](Program& p) { p.attributes.at(name) = value; };
}
inline std::function<void(Program&)> operand(size_t i, XLA_FFI_DataType dtype,
                                             std::vector<int64_t> dims) {
  return [=](Program& p) { p.operands.at(i) = Tensor(dtype, dims); };
}
inline std::function<void(Program&)> result(size_t i, XLA_FFI_DataType dtype,
                                            std::vector<int64_t> dims) {
  return [=](Program& p) { p.results.at(i) = Tensor(dtype, dims); };
}

}  // namespace jaxtap::testing

// A function that returns a case, registered.
#define CASE(name)                                                  \
  static ::jaxtap::testing::Case name();                            \
  static const ::jaxtap::testing::Registered registered_##name(name); \
  static ::jaxtap::testing::Case name()
