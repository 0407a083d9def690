// One matmul of rows with a packed weight, by the CUDA half, whose cuBLASLt is one in memory, and
// by the CPU's kernels.
#pragma once

#include <algorithm>
#include <memory>
#include <string>

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
    spoil_all(found);
  }

  size_t bytes() const {
    const cuda::PackedSteps steps(args);
    const size_t aligned = steps.bytes == 0 ? 0 : steps.bytes + cuda::kSection;
    return aligned + (steps.library ? FakeCublasLt::kWorkspace : 0);
  }

  // As the handlers do it: a plan without addresses, if there is one, and then a call.
  void on_device(FakeCublasLt& lt, cuda::LtHandle handle) {
    const cuda::PackedSteps steps(args);
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
    spoil_all(workspace);
    cuda::PackedMatmul there = args;
    there.x = x.get();
    there.weight = weights.buffer.get();
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
    there.planes = given.quantizes ? 1 : 0;
    matmul(there, Parallel(), Isa::kGeneric);
    return wanted;
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
