// Matmuls by way of a cuBLASLt in memory, on threads in software, against those of the CPU; and
// plans whose making or running fails: no object is left, and the first error is the one told.
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "cuda/gemm/handles.h"
#include "cuda/gemm/plan.h"
#include "cuda/site.h"
#include "cuda/tests/cublaslt_faults.h"
#include "cuda/tests/kernels.h"
#include "tests/check.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::cuda;
using namespace jaxtap::testing;
using te::Scaling;

TEST(cublaslt_handles_are_one_per_device) {
  FakeRuntime cuda;
  FakeCublasLt lt;
  {
    LtHandles handles;
    const LtHandle first = handles.of(lt, cuda, 0), other = handles.of(lt, cuda, 3);
    CHECK(first != other && handles.of(lt, cuda, 0) == first && handles.of(lt, cuda, 3) == other);
    CHECK(lt.count("create") == 2 && cuda.device == 0);
  }
  CHECK(lt.left() == 0 && lt.misused == 0);
}

TEST(cublaslt_handles_with_a_fault_at_each_call) {
  for (bool late : {false, true}) {
    for (int at = 0; at < 4; ++at) {
      FakeRuntime cuda;
      FakeCublasLt lt;
      cuda.faults = {{at, 700 + at, late}};
      LtHandles handles;
      bool threw = false;
      try {
        handles.of(lt, cuda, 3);
      } catch (const CudaError& error) {
        threw = error.code() == 700 + at;
      }
      const std::string what = "fault at call " + std::to_string(at);
      // The third is the way back, which is tried again.
      CHECK_THAT(threw == (at < 2), what);
      CHECK_THAT(cuda.device == 0 && cuda.last_error == 0, what);
      CHECK_THAT(lt.left() == (threw ? 0u : 1u), what);
      CHECK_THAT(handles.of(lt, cuda, 3) != nullptr && lt.left() == 1, what);
    }
  }
  for (bool late : {false, true}) {
    FakeRuntime cuda;
    FakeCublasLt lt;
    lt.faults = {{0, 14, late}};
    LtHandles handles;
    CHECK(throws<CudaError>([&] { handles.of(lt, cuda, 3); }, "fake status 14"));
    CHECK(lt.left() == 0 && cuda.device == 0);
    CHECK(handles.of(lt, cuda, 3) != nullptr && lt.left() == 1);
  }
}

struct Plan : PerDevice {
  explicit Plan(int* gone) : gone(gone) {}
  ~Plan() override { ++*gone; }
  int* gone;
};

TEST(site_keeps_one_plan_per_device) {
  int gone = 0, made = 0;
  {
    CallSite site;
    CHECK(site.kept<Plan>(0) == nullptr);
    const auto make = [&]() -> std::unique_ptr<Plan> {
      if (++made == 1) throw std::runtime_error("the first time");
      return std::make_unique<Plan>(&gone);
    };
    CHECK(throws<std::runtime_error>([&] { site.keep<Plan>(0, make); }, "the first time"));
    CHECK(site.kept<Plan>(0) == nullptr);
    Plan& first = site.keep<Plan>(0, make);
    CHECK(&site.keep<Plan>(0, make) == &first && site.kept<Plan>(0) == &first);
    CHECK(&site.keep<Plan>(1, make) != &first && made == 3 && gone == 0);
  }
  CHECK(gone == 2);
}

// Making a plan takes up to seconds, in which nobody who asks for one, or warms up, may wait.
TEST(site_waits_for_no_plan_that_is_made) {
  int gone = 0;
  FakeRuntime cuda;
  PrivateStreams streams;
  CallSite site;
  bool asked = false;
  site.keep<Plan>(0, [&] {
    std::future<bool> other = std::async(std::launch::async, [&] {
      const bool none = site.kept<Plan>(0) == nullptr;
      return site.warm(cuda, streams, 0, FakeRuntime::stream(1), [](Stream) {}) && none;
    });
    asked = other.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    if (!asked) std::abort();  // the future would wait for this
    CHECK(other.get());
    return std::make_unique<Plan>(&gone);
  });
  CHECK(asked && site.kept<Plan>(0) != nullptr);
}

#if !defined(__SANITIZE_THREAD__)  // it doesn't know of the threads in software

struct Case {
  Scaling scaling;
  DType lhs, rhs;
  int64_t m, n, k;
  bool lhs_first, rhs_first;
  te::Float out;
  bool bias, gelu;
  float alpha, beta;

  std::string text() const {
    return std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k) + ", " +
           name(lhs) + " and " + name(rhs) + ", scaling " +
           std::to_string(static_cast<int>(scaling)) + ", out " +
           std::to_string(static_cast<int>(out)) + (lhs_first ? ", lhs first" : "") +
           (rhs_first ? ", rhs first" : "") + (bias ? ", bias" : "") + (gelu ? ", gelu" : "");
  }
};

// A factor and its scales.
struct Numbers {
  Numbers(DType dtype, Scaling scaling, int64_t lanes, int64_t k, std::mt19937& random)
      : data(lanes * k * bytes_of(dtype), 0),
        scales(scaling == Scaling::kMx        ? lanes * k / 32
               : scaling == Scaling::kChannel ? 4 * lanes
                                              : 4,
               scaling == Scaling::kMx ? 1 : 4) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (int64_t i = 0; i < lanes * k; ++i) {
      if (scaling == Scaling::kNone) {
        set_element(data.get(), dtype, i, normal(random));
      } else {
        // No NaN and no infinity; of int8 all quantized values.
        const auto qvalue = static_cast<uint8_t>(random());
        data.get()[i] = dtype == DType::S8
                            ? qvalue
                            : static_cast<uint8_t>((qvalue & 0x80) | qvalue % 0x58);
      }
    }
    for (int64_t i = 0; i < scales.size() / (scaling == Scaling::kMx ? 1 : 4); ++i) {
      if (scaling == Scaling::kMx) {
        scales.get()[i] = static_cast<uint8_t>(123 + random() % 8);
      } else {
        set_element(scales.get(), DType::F32, i, 0.5f + static_cast<float>(random() % 100) * 0.01f);
      }
    }
  }
  Buffer data, scales;
};

// One matmul on both sides, and its plan's parts.
struct Run {
  Run(const Case& c, std::mt19937& random)
      : given(c),
        lhs(c.lhs, c.scaling, c.m, c.k, random),
        rhs(c.rhs, c.scaling, c.n, c.k, random),
        bias(c.n * bytes_of(out_dtype()), 0),
        factors(8, 4),
        found(c.m * c.n * bytes_of(out_dtype()), 0) {
    for (int64_t i = 0; i < c.n; ++i) {
      set_element(bias.get(), out_dtype(), i, static_cast<float>(i % 7) - 3.0f);
    }
    set_element(factors.get(), DType::F32, 0, c.alpha);
    set_element(factors.get(), DType::F32, 1, c.beta);
    args.m = c.m;
    args.n = c.n;
    args.k = c.k;
    args.scaling = c.scaling;
    args.lhs = {lhs.data.get(), c.lhs, c.lhs_first, lhs.scales.get()};
    args.rhs = {rhs.data.get(), c.rhs, c.rhs_first, rhs.scales.get()};
    args.out_dtype = c.out;
    args.gelu = c.gelu;
    if (c.bias) args.bias = bias.get();
    args.out = found.get();
    fill_nan(found);
  }

  DType out_dtype() const { return kFloats[static_cast<int>(given.out)]; }

  GemmPlan::Options options() const {
    GemmPlan::Options options;
    options.has_bias = given.bias;
    options.fast = true;
    options.workspace =
        GemmWorkspace(args, given.bias).bytes + kWorkspaceAlignment + FakeCublasLt::kWorkspace;
    return options;
  }

  void on_device(FakeCublasLt& lt, LtHandle handle) {
    te::Gemm shapes = args;  // no addresses yet, as in `prepare`
    shapes.lhs.data = shapes.rhs.data = shapes.lhs.scales = shapes.rhs.scales = nullptr;
    shapes.bias = shapes.out = nullptr;
    GemmPlan plan(lt, handle, shapes, options());
    const size_t bytes = options().workspace;
    Buffer workspace(static_cast<int64_t>(bytes), 16);
    fill_nan(workspace);
    const auto* numbers = reinterpret_cast<const float*>(factors.get());
    plan.run(args, {numbers, numbers + 1, workspace.get(), bytes}, nullptr);
  }

  Buffer on_cpu() {
    Buffer wanted(found.size(), 0);
    te::Gemm there = args;
    there.alpha = given.alpha;
    there.out = wanted.get();
    te::gemm(there, Parallel());
    return wanted;
  }

  const Case given;
  Numbers lhs, rhs;
  Buffer bias, factors, found;
  te::Gemm args;
};

void check(const Case& c, std::mt19937& random) {
  if (!takes_case()) return;
  FakeCublasLt lt;
  {
    OwnedHandle handle(lt);
    lt.create(handle.place());
    Run run(c, random);
    run.on_device(lt, handle.get());
    const Buffer wanted = run.on_cpu();
    const DType dtype = run.out_dtype();
    bool good = true;
    const double step = dtype == DType::F32 ? 2e-6 : dtype == DType::F16 ? 1e-3 : 8e-3;
    // Sums are in other orders; int8's are exact.
    const bool bits = c.lhs == DType::S8 && !c.gelu;
    double most = 1.0;
    for (int64_t i = 0; i < c.m * c.n; ++i) {
      most = std::fmax(most, std::fabs(element(wanted.get(), dtype, i)));
    }
    const double slack = bits ? 0.0 : 1e-5 * (std::isfinite(most) ? most : 6.5e4);
    for (int64_t i = 0; i < c.m * c.n; ++i) {
      const double one = element(run.found.get(), dtype, i), other = element(wanted.get(), dtype, i);
      if (c.beta != 0.0f) {
        good = good && std::isnan(one);
      } else if (bits) {
        good = good && one == other;
      } else {
        good = good && (one == other || std::fabs(one - other) <= step * std::fabs(other) + slack);
      }
    }
    CHECK_THAT(good, c.text());
  }
  CHECK_THAT(lt.left() == 0 && lt.misused == 0, c.text() + ": objects or calls that can't be");
}

TEST(cuda_gemm) {
  std::mt19937 random(9);
  const DType e4m3 = DType::F8E4M3FN, e5m2 = DType::F8E5M2;
  struct Kind {
    Scaling scaling;
    DType lhs, rhs;
  };
  const Kind kinds[] = {
      {Scaling::kNone, DType::F32, DType::F32},     {Scaling::kNone, DType::BF16, DType::BF16},
      {Scaling::kNone, DType::F16, DType::F16},     {Scaling::kDelayedTensor, e4m3, e4m3},
      {Scaling::kCurrentTensor, e5m2, e4m3},        {Scaling::kChannel, e4m3, e5m2},
      {Scaling::kCurrentTensor, DType::S8, DType::S8}, {Scaling::kChannel, DType::S8, DType::S8},
      {Scaling::kMx, e4m3, e4m3},                   {Scaling::kMx, e4m3, e5m2}};
  struct Shape {
    int64_t m, n, k;
  };
  const Shape any[] = {{1, 1, 1}, {5, 16, 32}, {33, 24, 40}, {16, 70, 67}};
  const Shape blocks[] = {{1, 1, 32}, {5, 16, 32}, {130, 24, 160}, {16, 70, 96}};
  for (const Kind& kind : kinds) {
    for (const Shape& shape : kind.scaling == Scaling::kMx ? blocks : any) {
      for (int firsts = 0; firsts < 4; ++firsts) {
        for (int out = 0; out < 3; ++out) {
          for (int after = 0; after < 4; ++after) {
            // Some of all, others each time.
            if (random() % 3 != 0) continue;
            check({kind.scaling, kind.lhs, kind.rhs, shape.m, shape.n, shape.k, (firsts & 1) != 0,
                   (firsts & 2) != 0, static_cast<te::Float>(out), (after & 1) != 0,
                   (after & 2) != 0, random() % 2 == 0 ? 1.0f : -0.37f, 0.0f},
                  random);
          }
        }
      }
    }
    for (bool gelu : {false, true}) {
      check({kind.scaling, kind.lhs, kind.rhs, 4, 32, 32, true, true, te::Float::kBF16, true, gelu,
             1.0f, 2.0f},
            random);
    }
  }
}

// Few rows, and those that aren't a multiple, are where cuBLASLt's int8 fails on GPUs.
TEST(cuda_gemm_of_int8_has_any_number_of_rows) {
  std::mt19937 random(14);
  for (int64_t m : {1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 77, 129}) {
    for (int firsts = 0; firsts < 4; ++firsts) {
      for (int out = 0; out < 3; ++out) {
        check({m % 2 == 0 ? Scaling::kChannel : Scaling::kCurrentTensor, DType::S8, DType::S8, m, 16,
               32, (firsts & 1) != 0, (firsts & 2) != 0, static_cast<te::Float>(out), out == 1,
               false, 0.5f, 0.0f},
              random);
      }
    }
  }
}

// What already exists in multiples is read where it is, and summed where the result will be.
TEST(cuda_gemm_of_int8_copies_only_what_it_must) {
  te::Gemm args;
  args.lhs = {nullptr, DType::S8, true, nullptr};
  args.rhs = {nullptr, DType::S8, true, nullptr};
  args.scaling = Scaling::kChannel;
  args.n = args.k = 64;
  args.m = 96;
  CHECK(GemmWorkspace(args, false).bytes == 0);
  args.m = 97;
  CHECK(GemmWorkspace(args, false).bytes == 128 * 64 + 4 * 128 * 64);
  args.lhs.dtype = args.rhs.dtype = DType::F8E4M3FN;
  CHECK(GemmWorkspace(args, false).bytes == 0);
}

// Beta is 0, so that what was in the result before isn't read: NaN there changes no bit, of any
// dtypes and ways to compute.
TEST(cuda_gemm_reads_no_result) {
  std::mt19937 random(15);
  const DType e4m3 = DType::F8E4M3FN;
  for (const auto& [scaling, dtype] :
       {std::pair{Scaling::kNone, DType::F32}, {Scaling::kNone, DType::BF16},
        {Scaling::kNone, DType::F16}, {Scaling::kCurrentTensor, e4m3}, {Scaling::kChannel, e4m3},
        {Scaling::kMx, e4m3}, {Scaling::kCurrentTensor, DType::S8},
        {Scaling::kChannel, DType::S8}}) {
    for (int64_t n : {16, 5}) {
      for (int out = 0; out < 3; ++out) {
        for (int after = 0; after < 4; ++after) {
          if (!takes_case()) continue;
          Run run({scaling, dtype, dtype, 3, n, 32, true, true, static_cast<te::Float>(out),
                   (after & 1) != 0, (after & 2) != 0, 1.0f, 0.0f},
                  random);
          Buffer first(run.found.size(), 0);
          const auto bytes = static_cast<size_t>(first.size());
          for (int fill : {0, 0xFF}) {
            FakeCublasLt lt;
            OwnedHandle handle(lt);
            lt.create(handle.place());
            std::memset(run.found.get(), fill, static_cast<size_t>(run.found.size()));
            run.on_device(lt, handle.get());
            if (fill == 0) std::memcpy(first.get(), run.found.get(), bytes);
          }
          bool good = std::memcmp(first.get(), run.found.get(), bytes) == 0;
          for (int64_t i = 0; i < 3 * n; ++i) {
            good = good && !std::isnan(element(run.found.get(), run.out_dtype(), i));
          }
          CHECK_THAT(good, run.given.text());
        }
      }
    }
  }
}

// One that has everything, and one whose bias cuBLASLt adds.
const Case kCases[] = {{Scaling::kMx, DType::F8E4M3FN, DType::F8E5M2, 3, 5, 32, false, false,
                        te::Float::kBF16, true, true, 1.0f, 0.0f},
                       {Scaling::kNone, DType::BF16, DType::BF16, 3, 8, 16, true, false,
                        te::Float::kBF16, true, false, 1.0f, 0.0f}};

TEST(cuda_gemm_with_a_fault_at_each_call) {
  for (const Case& c : kCases) {
    std::mt19937 random(10);
    Run run(c, random);
    with_a_fault_at_each_call(c.text(), [&](auto& lt, LtHandle handle) { run.on_device(lt, handle); });
  }
}

TEST(cuda_gemm_that_nothing_can_compute) {
  std::mt19937 random(11);
  Run run(kCases[0], random);
  FakeCublasLt lt;
  {
    OwnedHandle handle(lt);
    lt.create(handle.place());
    lt.has_algorithms = false;
    CHECK(throws<Error>([&] { run.on_device(lt, handle.get()); }, "cuBLASLt has no algorithm"));
    te::Gemm shapes = run.args;  // as where kernels are chosen
    shapes.lhs.data = shapes.rhs.data = shapes.out = nullptr;
    const std::string why = gemm_refusal(lt, handle.get(), shapes, true, true, 1000);
    CHECK(why.find("cuBLASLt has no algorithm") != std::string::npos && lt.limit == 1000);
    lt.has_algorithms = true;
    CHECK(gemm_refusal(lt, handle.get(), shapes, true, true, 1000).empty());
    lt.faults = {{static_cast<int>(lt.calls.size()), 15, false}};
    CHECK(throws<CudaError>([&] { gemm_refusal(lt, handle.get(), shapes, true, true, 1000); },
                            "fake status 15"));
    CHECK(lt.count("multiply") == 0);
    GemmPlan::Options options = run.options();
    options.workspace = 100;
    CHECK(throws<Error>([&] { GemmPlan(lt, handle.get(), run.args, options); },
                        "got 100"));
  }
  CHECK(lt.left() == 0 && lt.misused == 0);
}

// What takes time or memory is done once; a call sets addresses, and multiplies.
TEST(cuda_gemm_calls_only_what_it_must) {
  std::mt19937 random(12);
  for (const Case& c : kCases) {
    Run run(c, random);
    FakeCublasLt lt;
    OwnedHandle handle(lt);
    lt.create(handle.place());
    const GemmPlan::Options options = run.options();
    GemmPlan plan(lt, handle.get(), run.args, options);
    CHECK(lt.count("choose") == 1 && lt.limit == FakeCublasLt::kWorkspace);
    lt.calls.clear();
    Buffer workspace(static_cast<int64_t>(options.workspace), 16);
    const auto* numbers = reinterpret_cast<const float*>(run.factors.get());
    for (int i = 0; i < 3; ++i) {
      plan.run(run.args, {numbers, numbers + 1, workspace.get(), options.workspace}, nullptr);
    }
    CHECK(lt.count("multiply") == 3);
    CHECK(lt.calls.size() == static_cast<size_t>(3 + lt.count("set_pointer")));
    te::Gemm odd = run.args;
    odd.lhs.data = run.lhs.data.get() + 1;
    const auto run_odd = [&] {
      plan.run(odd, {numbers, numbers + 1, workspace.get(), options.workspace}, nullptr);
    };
    // What is copied before may begin anywhere.
    if (!plan.steps().arranges_lhs) CHECK(throws<Error>(run_odd, "isn't a multiple of 16"));
    CHECK(throws<Error>(
        [&] { plan.run(run.args, {numbers, numbers + 1, workspace.get(), 8}, nullptr); },
        "got 8"));
  }
}

#endif

}  // namespace
