// Plans of matmuls with packed weights whose making or running fails: no object is left, and the
// first error is the one told.
#include <random>
#include <string>

#include "cuda/tests/cublaslt_faults.h"
#include "cuda/tests/packed_run.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)  // it doesn't know of the threads in software

namespace {

using namespace jaxtap;
using namespace jaxtap::cuda;
using namespace jaxtap::testing;

// Of int8, of floats, and of weights with groups.
const PackedCase kCases[] = {{257, 8, 3, 0, 8, true, 1, 1},
                             {257, 16, 3, 0, 4, false, 1, 0},
                             {33, 32, 16, 32, 8, true, 1, 1}};

TEST(cuda_packed_plans_with_a_fault_at_each_call) {
  for (const PackedCase& c : kCases) {
    std::mt19937 random(31);
    PackedRun run(c, random);
    with_a_fault_at_each_call(run.text(),
                              [&](auto& lt, LtHandle handle) { run.on_device(lt, handle); });
  }
}

TEST(cuda_packed_matmuls_that_nothing_can_compute) {
  std::mt19937 random(32);
  PackedRun run(kCases[0], random);
  FakeCublasLt lt;
  {
    OwnedHandle handle(lt);
    lt.create(handle.place());
    lt.has_algorithms = false;
    CHECK(throws<Error>([&] { run.on_device(lt, handle.get()); }, "cuBLASLt has no algorithm"));
    CHECK(throws<Error>([&] { PackedSums(lt, handle.get(), run.args, 100); },
                        "got 100"));
    PackedRun none({257, 0, 3, 0, 8, false, 1, 0}, random);
    CHECK(throws<Error>([&] { none.on_device(lt, handle.get()); }, "nothing is contracted"));
  }
  CHECK(lt.left() == 0 && lt.misused == 0);
  PackedMatmul longest = run.args;
  longest.layout.k = kMostExact + 1;
  CHECK(throws<Error>([&] { PackedWorkspace{longest}; }, "sums of int8 fit in int32, got"));
  longest.layout.k = kMostExact;
  CHECK(PackedWorkspace(longest).depth == kMostExact);
  PackedMatmul groups = run.args;
  groups.layout = panel_layout(96, 24, 8);
  CHECK(throws<Error>([&] { PackedWorkspace{groups}; }, "must have a multiple of 32 rows"));
}

// What takes time or memory is done once; a call multiplies, and that's all.
TEST(cuda_packed_calls_only_what_it_must) {
  std::mt19937 random(33);
  for (const PackedCase& c : kCases) {
    PackedRun run(c, random);
    FakeCublasLt lt;
    OwnedHandle handle(lt);
    lt.create(handle.place());
    const PackedSums sums(lt, handle.get(), run.args, run.bytes());
    CHECK(lt.count("choose") == 1 && lt.limit == FakeCublasLt::kWorkspace);
    lt.calls.clear();
    for (int i = 0; i < 3; ++i) run.call(&sums, run.bytes());
    CHECK(lt.calls.size() == 3 && lt.count("multiply") == 3);
    CHECK(throws<Error>([&] { run.call(&sums, 8); }, "got 8"));
    CHECK(throws<Error>([&] { run.call(nullptr, run.bytes()); }, "has no plan"));
    PackedMatmul odd = run.args;
    odd.x = run.x.get() + 2;
    odd.weight = run.weights.buffer.get();
    odd.y = run.found.get();
    Buffer workspace(static_cast<int64_t>(run.bytes()), 0);
    CHECK(throws<Error>(
        [&] { packed_matmul(odd, &sums, workspace.get(), run.bytes(), nullptr); },
        "isn't a multiple of 16"));
    odd.x = run.x.get();
    odd.weight += 8;
    CHECK(throws<Error>(
        [&] { packed_matmul(odd, &sums, workspace.get(), run.bytes(), nullptr); },
        "packed weight begins at an address"));
  }
}

TEST(cuda_packed_steps_by_rows) {
  PackedMatmul args;
  args.n = 16;
  for (bool quantizes : {false, true}) {
    for (te::Float dtype : {te::Float::kF32, te::Float::kBF16, te::Float::kF16}) {
      for (int64_t group : {0, 32}) {
        args.quantizes = quantizes;
        args.x_dtype = dtype;
        args.layout = panel_layout(64, group, 8);
        for (int64_t m : {1, 16, 17}) {
          args.m = m;
          const bool wide = dtype == te::Float::kF32 && !quantizes;
          const PackedWorkspace steps(args);
          CHECK(steps.library == (m > 16 && !wide));
          CHECK(steps.rounds == (steps.library && group != 0));
          CHECK(steps.exact == (steps.library && quantizes && group == 0));
          CHECK((steps.bytes == 0) == (!quantizes && !steps.library));
        }
      }
    }
  }
}

// The head of a language model: a gigabyte in 16 bits.
TEST(cuda_packed_steps_of_many_columns) {
  PackedMatmul args;
  args.m = 512;
  args.n = 128256;
  args.x_dtype = args.y_dtype = te::Float::kBF16;
  for (bool quantizes : {false, true}) {
    for (int bits : {8, 4}) {
      args.quantizes = quantizes;
      args.layout = panel_layout(4096, 0, bits);
      const PackedWorkspace steps(args);
      CHECK(steps.library && steps.chunk < steps.cols);
      CHECK(steps.chunk % args.layout.columns() == 0);
      CHECK(steps.col_factors - steps.weight <= kMostUnpacked + (size_t{2} << 20));
      CHECK(steps.bytes < (size_t{384} << 20));
    }
  }
  args.n = 4096;  // fits
  CHECK(PackedWorkspace(args).chunk == 4096);
}

}  // namespace

#endif
