// cuBLASLt's matrices are column by column: what is a row to XLA is a column to it. So its A is
// rhs, its B is lhs, and its result, [n, m] by columns, is [m, n] by rows.
#include "cuda/gemm/plan.h"

#include <string>

#include "common/error.h"
#include "cuda/gemm/choose.h"
#include "cuda/kernels/gemm.h"

namespace jaxtap::cuda {
namespace {

// An address to choose an algorithm for, before there are any: cuBLASLt asks whether there is one.
const void* some_address() { return reinterpret_cast<const void*>(uintptr_t{kWorkspaceAlignment}); }

LtType type_of(DType dtype) {
  switch (dtype) {
    case DType::BF16: return LtType::kBF16;
    case DType::F16: return LtType::kF16;
    case DType::F8E4M3FN: return LtType::kE4M3;
    case DType::F8E5M2: return LtType::kE5M2;
    case DType::S8: return LtType::kS8;
    default: return LtType::kF32;
  }
}

LtType type_of(te::Float dtype) {
  return dtype == te::Float::kF32    ? LtType::kF32
         : dtype == te::Float::kBF16 ? LtType::kBF16
                                     : LtType::kF16;
}

std::string text_of(const te::Gemm& args) {
  return std::string(name(args.lhs.dtype)) + "[" + std::to_string(args.m) + ", " +
         std::to_string(args.k) + "] times " + name(args.rhs.dtype) + "[" +
         std::to_string(args.k) + ", " + std::to_string(args.n) + "], scaling_mode " +
         std::to_string(static_cast<int64_t>(args.scaling));
}

}  // namespace

GemmPlan::GemmPlan(CublasLt& lt, LtHandle handle, const te::Gemm& args, const Options& options)
    : lt_(lt),
      handle_(handle),
      steps_(args, options.has_bias),
      alignment_(options.alignment),
      matmul_(lt),
      a_(lt),
      b_(lt),
      out_(lt) {
  const size_t needed = steps_.bytes + kWorkspaceAlignment;
  if (options.workspace < needed) {
    throw invalid_argument("workspace must have ", needed, " bytes, and some for cuBLASLt, got ",
                           options.workspace,
                           ". Call te_ffi_kernels.gemm_v2, which knows the size.");
  }
  describe(args, options.fast);
  choose(args, options.workspace - needed);
}

void GemmPlan::describe(const te::Gemm& args, bool fast) {
  lt_.check(lt_.create_matmul(matmul_.place(), steps_.exact ? LtSums::kS32 : LtSums::kF32),
            "describing a matmul");
  const auto set = [&](LtNumber which, int32_t value) {
    lt_.check(lt_.set_number(matmul_.get(), which, value), "describing a matmul");
  };
  const auto point = [&](LtPointer which) {
    lt_.check(lt_.set_pointer(matmul_.get(), which, some_address()), "describing a matmul");
  };
  const bool rhs_first = args.rhs.k_is_last || steps_.arranges_rhs;
  const bool lhs_first = args.lhs.k_is_last || steps_.arranges_lhs;
  set(LtNumber::kTurnA, rhs_first);
  set(LtNumber::kTurnB, !lhs_first);
  if (!steps_.finishes) set(LtNumber::kFactorsOnDevice, 1);
  if (steps_.adds_bias) {
    set(LtNumber::kAddsBias, 1);
    set(LtNumber::kBiasType, static_cast<int32_t>(type_of(args.out_dtype)));
    point(LtPointer::kBias);
  }
  if (steps_.quantized && !steps_.exact && fast) set(LtNumber::kFastSums, 1);
  if (steps_.mx) {
    set(LtNumber::kBlocksOfA, 1);
    set(LtNumber::kBlocksOfB, 1);
    point(LtPointer::kScalesOfA);
    point(LtPointer::kScalesOfB);
  }
  const auto layout = [&](OwnedLayout& owned, LtType type, int64_t rows, int64_t cols) {
    lt_.check(lt_.create_layout(owned.place(), type, rows, cols, rows), "describing a matrix");
  };
  const LtType a = type_of(args.rhs.dtype), b = type_of(args.lhs.dtype);
  const LtType out = steps_.exact      ? LtType::kS32
                     : steps_.finishes ? LtType::kF32
                                       : type_of(args.out_dtype);
  const int64_t n = steps_.cols, m = steps_.rows, k = steps_.depth;
  layout(a_, a, rhs_first ? k : n, rhs_first ? n : k);
  layout(b_, b, lhs_first ? k : m, lhs_first ? m : k);
  layout(out_, out, n, m);
}

LtCall GemmPlan::call() const {
  LtCall call;
  call.matmul = matmul_.get();
  call.a_layout = a_.get();
  call.b_layout = b_.get();
  call.out_layout = out_.get();
  return call;
}

void GemmPlan::choose(const te::Gemm& args, size_t workspace) {
  if (!lt_choose(lt_, handle_, call(), workspace, &algorithm_, &workspace_,
                 alignment_)) {
    throw failed_precondition("cuBLASLt has no algorithm on this GPU for ", text_of(args),
                              "; use another scaling_mode, or te_ffi_kernels.reference.gemm_v2");
  }
}

void GemmPlan::run(const te::Gemm& args, const GemmMemory& memory, Stream stream) {
  // Those that cuBLASLt reads and writes itself.
  for (const void* address : {steps_.arranges_lhs ? nullptr : args.lhs.data,
                              steps_.arranges_rhs ? nullptr : args.rhs.data,
                              steps_.keeps_sums ? nullptr : const_cast<const void*>(args.out)}) {
    if (reinterpret_cast<uintptr_t>(address) % alignment_ != 0) {
      throw invalid_argument("an array begins at ", address, ", which isn't a multiple of ",
                             alignment_, "; XLA's arrays are");
    }
  }
  char* workspace = align_workspace(memory.workspace);
  const size_t needed = steps_.bytes + workspace_;
  if (workspace - static_cast<char*>(memory.workspace) + needed > memory.bytes) {
    throw invalid_argument("workspace must have ", needed, " bytes, got ", memory.bytes);
  }
  const auto part = [&](size_t at) { return workspace + at; };

  LtCall call = this->call();
  call.a = args.rhs.data;
  call.b = args.lhs.data;
  if (steps_.arranges_rhs) {
    call.a = part(steps_.rhs);
    transpose_and_pad({static_cast<const uint8_t*>(args.rhs.data), args.rhs.k_is_last,
                       args.n, args.k, reinterpret_cast<uint8_t*>(part(steps_.rhs)),
                       steps_.cols, steps_.depth},
                      stream);
  }
  if (steps_.arranges_lhs) {
    call.b = part(steps_.lhs);
    transpose_and_pad({static_cast<const uint8_t*>(args.lhs.data), args.lhs.k_is_last,
                       args.m, args.k, reinterpret_cast<uint8_t*>(part(steps_.lhs)),
                       steps_.rows, steps_.depth},
                      stream);
  }
  if (steps_.mx) {
    const auto scales = [&](const te::Factor& factor, int64_t lanes, size_t at) {
      gemm_scales({static_cast<const uint8_t*>(factor.scales), factor.k_is_last, lanes,
                   args.k / te::kBlock, reinterpret_cast<uint8_t*>(part(at))},
                  stream);
    };
    scales(args.lhs, args.m, steps_.lhs_scales);
    scales(args.rhs, args.n, steps_.rhs_scales);
  }
  const bool tensor = te::is_tensor(args.scaling), channel = args.scaling == te::Scaling::kChannel;
  const auto scales = [&](const te::Factor& factor) {
    return tensor || channel ? static_cast<const float*>(factor.scales) : nullptr;
  };
  const float one = 1.0f, zero = 0.0f;
  const int32_t exact_one = 1, exact_zero = 0;
  if (!steps_.finishes) {
    auto* factors = reinterpret_cast<float*>(part(steps_.factors));
    gemm_factors({memory.alpha, memory.beta, scales(args.lhs), scales(args.rhs), factors}, stream);
    call.alpha = factors;
    call.beta = factors + 1;
  } else if (steps_.exact) {
    call.alpha = &exact_one;
    call.beta = &exact_zero;
  } else {
    call.alpha = &one;
    call.beta = &zero;
  }
  call.out = steps_.keeps_sums ? part(steps_.sums) : args.out;
  {
    std::lock_guard<std::mutex> hold(lock_);
    const auto point = [&](LtPointer which, const void* address) {
      lt_.check(lt_.set_pointer(matmul_.get(), which, address), "describing a matmul");
    };
    if (steps_.adds_bias) point(LtPointer::kBias, args.bias);
    if (steps_.mx) {
      point(LtPointer::kScalesOfA, part(steps_.rhs_scales));
      point(LtPointer::kScalesOfB, part(steps_.lhs_scales));
    }
    const int status =
        lt_.multiply(handle_, call, algorithm_, part(steps_.bytes), workspace_, stream);
    check_run(lt_, status, "multiplying");
  }
  if (!steps_.finishes) return;
  GemmFinish finish;
  finish.sums = call.out;
  finish.exact = steps_.exact;
  finish.m = args.m;
  finish.n = args.n;
  finish.stride = steps_.cols;
  finish.per_lane = channel;
  finish.lhs_scales = scales(args.lhs);
  finish.rhs_scales = scales(args.rhs);
  finish.alpha = memory.alpha;
  finish.beta = memory.beta;
  finish.bias = steps_.adds_bias ? nullptr : args.bias;
  finish.gelu = args.gelu;
  finish.out = args.out;
  finish.dtype = args.out_dtype;
  gemm_finish(finish, stream);
}

std::string gemm_refusal(CublasLt& lt, LtHandle handle, const te::Gemm& args, bool has_bias,
                         bool fast, size_t limit) {
  GemmPlan::Options options;
  options.has_bias = has_bias;
  options.fast = fast;
  options.workspace = GemmWorkspace(args, has_bias).bytes + kWorkspaceAlignment + limit;
  try {
    const GemmPlan plan(lt, handle, args, options);
  } catch (const Error& refused) {
    return refused.what();
  }
  return "";
}

}  // namespace jaxtap::cuda
