// One matmul of rows with a packed weight, by the CUDA half, whose cuBLASLt is one in memory, and
// by the CPU's kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cuda/gemm/packed.h"
#include "cuda/gemm/steps.h"
#include "cuda/tests/fake_cublaslt.h"
#include "cuda/tests/kernels.h"
#include "matmul/matmul.h"

namespace jaxtap::testing {

struct PackedCase {
  int64_t m, k, n, group;
  int bits;
  bool quantizes;
  int in, out;  // dtypes
  int scale_bits = 32;
};

struct PackedRun {
  PackedRun(const PackedCase& c, std::mt19937& random)
      : given(c),
        weights(random_weights(c.n, panel_layout(c.k, c.group, c.bits, c.scale_bits), random)),
        x(numbers(c.m * c.k, kFloats[c.in], true, 1.0f, random)),
        found(c.m * c.n * bytes_of(kFloats[c.out]), 0) {
    args.x_dtype = static_cast<te::Float>(c.in);
    args.m = c.m;
    args.n = c.n;
    args.layout = weights.layout;
    args.quantizes = c.quantizes;
    args.y_dtype = static_cast<te::Float>(c.out);
    fill_nan(found);
  }

  size_t bytes() const {
    const cuda::PackedWorkspace steps(args);
    const size_t aligned = steps.bytes == 0 ? 0 : steps.bytes + cuda::kWorkspaceAlignment;
    return aligned + (steps.library ? FakeCublasLt::kWorkspace : 0);
  }

  // As the handlers do it: a plan without addresses, if there is one, and then a call.
  void on_device(FakeCublasLt& lt, cuda::LtHandle handle) {
    const cuda::PackedWorkspace steps(args);
    std::unique_ptr<cuda::PackedSums> sums;
    if (steps.library && !steps.empty) {
      sums = std::make_unique<cuda::PackedSums>(lt, handle, args, bytes());
    }
    call(sums.get(), bytes());
  }

  void on_device() {
    FakeCublasLt lt;
    {
      cuda::OwnedHandle handle(lt);
      lt.create(handle.place());
      on_device(lt, handle.get());
      multiplied = lt.count("multiply");
    }
    sound = lt.left() == 0 && lt.misused == 0;
  }

  void call(const cuda::PackedSums* sums, size_t size) {
    Buffer workspace(static_cast<int64_t>(size), 16);
    fill_nan(workspace);
    cuda::PackedMatmul there = args;
    there.x = x.get();
    if (there.weight == nullptr) there.weight = weights.buffer.get();
    there.y = found.get();
    cuda::packed_matmul(there, sums, workspace.get(), size, nullptr);
  }

  Buffer on_cpu() const {
    Buffer wanted(found.size(), 0);
    Matmul there;
    there.x = x.get();
    there.x_dtype = kFloats[given.in];
    there.m = given.m;
    there.weights = weights.packed();
    there.y = wanted.get();
    there.y_dtype = kFloats[given.out];
    there.digits = given.quantizes ? 1 : 0;
    matmul(there, Parallel(), Isa::kGeneric);
    return wanted;
  }

  // A row of x in float64; for int8 what it is rounded to: multiples of 1/127 of the largest
  // magnitude of the row, or of its group.
  std::vector<double> row_of_x(int64_t row) const {
    const PackedCase& c = given;
    std::vector<double> numbers(static_cast<size_t>(c.k));
    for (int64_t j = 0; j < c.k; ++j) {
      numbers[static_cast<size_t>(j)] = element(x.get(), kFloats[c.in], row * c.k + j);
    }
    const size_t group = static_cast<size_t>(c.group == 0 ? c.k : c.group);
    for (size_t begin = 0; c.quantizes && begin < numbers.size(); begin += group) {
      double most = 0;
      for (size_t j = begin; j < begin + group; ++j) most = std::max(most, std::fabs(numbers[j]));
      const float scale = std::max(static_cast<float>(most) * (1.0f / 127.0f), 0x1p-126f);
      for (size_t j = begin; j < begin + group; ++j) {
        const float ratio =
            std::min(127.0f, std::max(-127.0f, static_cast<float>(numbers[j]) / scale));
        numbers[j] = static_cast<double>(std::nearbyint(ratio)) * static_cast<double>(scale);
      }
    }
    return numbers;
  }

  double at(int64_t index) const { return element(found.get(), kFloats[given.out], index); }

  std::string text() const {
    return std::to_string(given.m) + " x " + std::to_string(given.k) + " x " +
           std::to_string(given.n) + ", group " + std::to_string(given.group) + ", " +
           std::to_string(given.bits) + " bits with scales of " + std::to_string(given.scale_bits) +
           ", " + name(kFloats[given.in]) + " to " +
           name(kFloats[given.out]) + (given.quantizes ? ", quantized" : "");
  }

  const PackedCase given;
  Weights weights;
  Buffer x, found;
  cuda::PackedMatmul args;  // without addresses
  int multiplied = 0;        // matmuls of cuBLASLt
  bool sound = true;         // whether it was used as it must be
};

}  // namespace jaxtap::testing
