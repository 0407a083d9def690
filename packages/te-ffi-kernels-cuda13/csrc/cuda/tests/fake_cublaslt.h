// A small cuBLASLt in memory, which multiplies slowly and asks for what cuBLASLt asks for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/convert.h"
#include "cuda/cublaslt.h"
#include "cuda/tests/fake_library.h"
#if defined(JAXTAP_ON_DEVICE)
#include "cuda/tests/on_device.h"
#endif
#include "te/table.h"

namespace jaxtap::testing {

class FakeCublasLt : public cuda::CublasLt, public FakeLibrary {
 public:
  using Type = cuda::LtType;

  bool has_algorithms = true;
  size_t limit = 0;  // of the workspace, as it was last asked for
  static constexpr size_t kWorkspace = 96;

  // Objects that nobody has destroyed.
  size_t left() const { return handles.size() + matmuls.size() + layouts.size() + prefs.size(); }

  int create(cuda::LtHandle* handle) override {
    return call("create", [&] { add(handles, handle); });
  }
  int destroy(cuda::LtHandle handle) override {
    remove(handles, handle);
    return call("destroy", [] {});
  }
  int create_matmul(cuda::LtMatmul* matmul, cuda::LtSums sums) override {
    return call("create_matmul", [&] { add(matmuls, matmul).exact = sums == cuda::LtSums::kS32; });
  }
  int destroy_matmul(cuda::LtMatmul matmul) override {
    remove(matmuls, matmul);
    return call("destroy_matmul", [] {});
  }
  int set_number(cuda::LtMatmul matmul, cuda::LtNumber which, int32_t value) override {
    return call("set_number", [&] { matmuls[matmul].numbers[which] = value; });
  }
  int set_pointer(cuda::LtMatmul matmul, cuda::LtPointer which, const void* value) override {
    return call("set_pointer", [&] { matmuls[matmul].pointers[which] = value; });
  }
  int create_layout(cuda::LtLayout* layout, Type type, int64_t rows, int64_t cols,
                    int64_t stride) override {
    return call("create_layout", [&] { add(layouts, layout) = {type, rows, cols, stride}; });
  }
  int destroy_layout(cuda::LtLayout layout) override {
    remove(layouts, layout);
    return call("destroy_layout", [] {});
  }
  int create_preference(cuda::LtPreference* preference) override {
    return call("create_preference", [&] { add(prefs, preference); });
  }
  int destroy_preference(cuda::LtPreference preference) override {
    remove(prefs, preference);
    return call("destroy_preference", [] {});
  }
  int limit_workspace(cuda::LtPreference, size_t bytes) override {
    return call("limit_workspace", [&] { limit = bytes; });
  }
  int set_alignment(cuda::LtPreference, uint32_t bytes) override {
    return call("set_alignment", [&] { misused += bytes != 16; });
  }
  int choose(cuda::LtHandle handle, const cuda::LtCall& given, cuda::LtPreference preference,
             cuda::LtAlgorithm* algorithm, size_t* workspace, bool* found) override {
    *found = false;
    return call("choose", [&] {
      misused += handles.count(handle) == 0 || prefs.count(preference) == 0 || !accepts(given);
      algorithm->data[0] = kMark;
      *workspace = kWorkspace < limit ? kWorkspace : limit;
      *found = has_algorithms;
    });
  }
  int multiply(cuda::LtHandle handle, const cuda::LtCall& given,
               const cuda::LtAlgorithm& algorithm, void* workspace, size_t bytes,
               cuda::Stream) override {
    return call("multiply", [&] {
      if (handles.count(handle) == 0 || algorithm.data[0] != kMark || !accepts(given)) {
        ++misused;
        return;
      }
      if (bytes != 0) std::memset(workspace, 0xEE, bytes);
      run(given);
    });
  }
  std::string text(int status) override { return said_of(status); }

 private:
  struct Matmul {
    bool exact = false;
    std::map<cuda::LtNumber, int32_t> numbers;
    std::map<cuda::LtPointer, const void*> pointers;
    int32_t number(cuda::LtNumber which) const {
      const auto found = numbers.find(which);
      return found == numbers.end() ? 0 : found->second;
    }
    const void* pointer(cuda::LtPointer which) const {
      const auto found = pointers.find(which);
      return found == pointers.end() ? nullptr : found->second;
    }
  };
  struct Layout {
    Type type = Type::kF32;
    int64_t rows = 0, cols = 0, stride = 0;
  };
  static constexpr uint64_t kMark = 77;

  static bool is_quantized(Type type) {
    return type == Type::kE4M3 || type == Type::kE5M2 || type == Type::kS8;
  }

  // Whether the table of dtypes in cuBLASLt's documentation has this, and its rules for quantized
  // values hold; of int8 also what its documentation doesn't say, and GPUs want: columns in
  // multiples of 32.
  bool accepts(const cuda::LtCall& given) const {
    if (matmuls.count(given.matmul) == 0) return false;
    for (cuda::LtLayout one : {given.a_layout, given.b_layout, given.out_layout}) {
      if (layouts.count(one) == 0) return false;
    }
    const Matmul& matmul = matmuls.at(given.matmul);
    const Layout &a = layouts.at(given.a_layout), &b = layouts.at(given.b_layout);
    const Layout& out = layouts.at(given.out_layout);
    const bool turn_a = matmul.number(cuda::LtNumber::kTurnA) != 0;
    const bool turn_b = matmul.number(cuda::LtNumber::kTurnB) != 0;
    const int64_t n = turn_a ? a.cols : a.rows, k = turn_a ? a.rows : a.cols;
    if ((turn_b ? b.cols : b.rows) != k || (turn_b ? b.rows : b.cols) != out.cols) return false;
    if (out.rows != n) return false;
    if (is_quantized(a.type) != is_quantized(b.type)) return false;
    const bool bias = matmul.number(cuda::LtNumber::kAddsBias) != 0;
    if (bias && matmul.pointer(cuda::LtPointer::kBias) == nullptr) return false;
    if (bias && matmul.number(cuda::LtNumber::kBiasType) != static_cast<int32_t>(out.type)) {
      return false;
    }
    if (matmul.exact) {
      if (a.type != Type::kS8 || b.type != Type::kS8 || out.type != Type::kS32 || bias) return false;
    } else if (is_quantized(a.type)) {
      if (a.type == Type::kS8 || (a.type == Type::kE5M2 && b.type == Type::kE5M2)) return false;
      if (bias && out.type == Type::kF32) return false;
    } else if (a.type != b.type || (out.type != Type::kF32 && out.type != a.type)) {
      return false;
    }
    if (a.type == Type::kS8 && out.cols % 32 != 0) return false;
    return !is_quantized(a.type) || (turn_a && !turn_b && k % 16 == 0 && n % 16 == 0);
  }

  static double read(Type type, const void* data, int64_t at) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    const auto value_of = [&](te::QType format) {
      float out;
      te::table().decode[static_cast<int>(format)](bytes + at, &out, 1);
      return static_cast<double>(out);
    };
    float wide;
    uint16_t half;
    switch (type) {
      case Type::kE4M3: return value_of(te::QType::kE4M3);
      case Type::kE5M2: return value_of(te::QType::kE5M2);
      case Type::kS8: return value_of(te::QType::kInt8);
      case Type::kF32: std::memcpy(&wide, bytes + 4 * at, 4); return static_cast<double>(wide);
      default: break;
    }
    std::memcpy(&half, bytes + 2 * at, 2);
    return static_cast<double>(type == Type::kBF16 ? bf16_to_f32(half) : f16_to_f32(half));
  }

  static void write(Type type, void* data, int64_t at, double value) {
    auto* bytes = static_cast<uint8_t*>(data);
    const auto wide = static_cast<float>(value);
    if (type == Type::kS32) {
      const auto whole = static_cast<int32_t>(value);
      std::memcpy(bytes + 4 * at, &whole, 4);
    } else if (type == Type::kF32) {
      std::memcpy(bytes + 4 * at, &wide, 4);
    } else {
      const uint16_t half = type == Type::kBF16 ? f32_to_bf16(wide) : f32_to_f16(wide);
      std::memcpy(bytes + 2 * at, &half, 2);
    }
  }

  // The scale of block `block` of lane `lane`, from the place that the documentation gives it.
  static double scale(const void* scales, int64_t lane, int64_t block, int64_t blocks) {
    const int64_t tile = lane / 128 * ((blocks + 3) / 4) + block / 4;
    const int64_t at = tile * 512 + lane % 32 * 16 + lane % 128 / 32 * 4 + block % 4;
    return std::ldexp(1.0, static_cast<const uint8_t*>(scales)[at] - 127);
  }

  void run(const cuda::LtCall& given) const {
    const Matmul& matmul = matmuls.at(given.matmul);
    const Layout &a = layouts.at(given.a_layout), &b = layouts.at(given.b_layout);
    const Layout& out = layouts.at(given.out_layout);
    const bool turn_a = matmul.number(cuda::LtNumber::kTurnA) != 0;
    const bool turn_b = matmul.number(cuda::LtNumber::kTurnB) != 0;
    const int64_t k = turn_a ? a.rows : a.cols;
    double alpha = 1;
    if (matmul.exact) {
      int32_t whole;
      std::memcpy(&whole, given.alpha, 4);
      alpha = whole;
    } else {
      alpha = read(Type::kF32, given.alpha, 0);
    }
    // Beta: 0 or 1, on the host where alpha is.
    int32_t beta;
    std::memcpy(&beta, given.beta, 4);
    const bool adds = beta != 0;
    const bool blocks = matmul.number(cuda::LtNumber::kBlocksOfA) != 0;
    for (int64_t j = 0; j < out.cols; ++j) {
      for (int64_t i = 0; i < out.rows; ++i) {
        double sum = 0;
        for (int64_t l = 0; l < k; ++l) {
          double one = read(a.type, given.a, turn_a ? l + i * a.stride : i + l * a.stride);
          one *= read(b.type, given.b, turn_b ? j + l * b.stride : l + j * b.stride);
          if (blocks) {
            one *= scale(matmul.pointer(cuda::LtPointer::kScalesOfA), i, l / 32, k / 32);
            one *= scale(matmul.pointer(cuda::LtPointer::kScalesOfB), j, l / 32, k / 32);
          }
          sum += one;
        }
        sum *= alpha;
        if (adds) sum += read(out.type, given.out, i + j * out.stride);
        if (matmul.number(cuda::LtNumber::kAddsBias) != 0) {
          sum += read(out.type, matmul.pointer(cuda::LtPointer::kBias), i);
        }
        write(out.type, given.out, i + j * out.stride, sum);
      }
    }
#if defined(JAXTAP_ON_DEVICE)
    const size_t element = out.type == Type::kBF16 || out.type == Type::kF16 ? 2 : 4;
    for (int64_t j = 0; j < out.cols; ++j) {
      const auto* column = static_cast<const uint8_t*>(given.out) + element * (j * out.stride);
      cuda::on_device::mark_written(column, element * static_cast<size_t>(out.rows));
    }
#endif
  }

  std::map<cuda::LtHandle, Nothing> handles;
  std::map<cuda::LtMatmul, Matmul> matmuls;
  std::map<cuda::LtLayout, Layout> layouts;
  std::map<cuda::LtPreference, Nothing> prefs;
};

}  // namespace jaxtap::testing
