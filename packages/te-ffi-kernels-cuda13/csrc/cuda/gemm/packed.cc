// As in plan.cc, what is a row to XLA is a column to cuBLASLt: A is the weight, B is x.
#include "cuda/gemm/packed.h"

#include <algorithm>

#include "common/error.h"
#include "cuda/gemm/choose.h"
#include "cuda/gemm/steps.h"
#include "cuda/kernels/gemm.h"

namespace jaxtap::cuda {
namespace {

PackedWeight unpacked(const PackedMatmul& args, const PackedWorkspace& steps) {
  PackedWeight weight;
  weight.weight = args.weight;
  weight.stack = args.stack;
  weight.layout = args.layout;
  weight.n = args.n;
  weight.as_int8 = steps.exact;
  weight.dtype = steps.wide;
  return weight;
}

void multiply(const PackedMma& mma, const PackedMatmul& args, Stream stream) {
  if (args.quantizes) return packed_mma_int8(mma, stream);
  switch (args.x_dtype) {
    case te::Float::kF32: return packed_mma_f32(mma, stream);
    case te::Float::kBF16: return packed_mma_bf16(mma, stream);
    case te::Float::kF16: return packed_mma_f16(mma, stream);
  }
}

void check_call(const PackedMatmul& args, const PackedSums* sums) {
  if (sums == nullptr) throw failed_precondition("the matmul has no plan");
  for (const void* address : {args.x, const_cast<const void*>(args.y)}) {
    if (reinterpret_cast<uintptr_t>(address) % kLtAlignment != 0) {
      throw invalid_argument("an array begins at ", address, ", which isn't a multiple of ",
                             kLtAlignment, "; XLA's arrays are");
    }
  }
}

}  // namespace

PackedWorkspace::PackedWorkspace(const PackedMatmul& args) {
  const PanelLayout& layout = args.layout;
  if (args.quantizes && layout.group == 0 && layout.k > kMostExact) {
    throw invalid_argument("k must be at most ", kMostExact, " without groups, where sums of int8 "
                           "fit in int32, got ", args.layout.k);
  }
  if (layout.group % kGroupRows != 0) {
    throw invalid_argument("groups must have a multiple of ", kGroupRows, " rows on GPUs, got ",
                           layout.group, ". Use the op of te_ffi_kernels.reference.");
  }
  empty = args.m == 0 || args.n == 0;
  library = args.m > kFewRows && args.row_groups == kOneGroup &&
            (args.quantizes || args.x_dtype != te::Float::kF32);
  rounds = library && layout.group != 0;
  exact = library && args.quantizes && !rounds;
  wide = args.x_dtype == te::Float::kF16 ? te::Float::kF16 : te::Float::kBF16;
  depth = args.quantizes ? layout.padded_k() : args.layout.k;
  cols = panel_count(args.n, layout.columns()) * layout.columns();
  rows = exact ? up_to(args.m, kInt8Rows) : args.m;
  // Values of bfloat16 have their scales, so that their sums are results.
  const bool sums_are_results = rounds && wide == te::Float::kBF16 && cols == args.n &&
                                (args.y_dtype == wide || args.y_dtype == te::Float::kF32);
  finishes = library && !sums_are_results;
  keeps_sums =
      finishes && (args.y_dtype != te::Float::kF32 || cols != args.n || rows != args.m);
  chunk = cols;
  if (library && cols != 0) {
    const auto most = static_cast<int64_t>(args.most == 0 ? kMostUnpacked : args.most);
    const int64_t column_bytes = (exact ? 1 : 2) * depth;
    const int64_t panel_bytes = std::max<int64_t>(1, column_bytes * layout.columns());
    const int64_t panels = std::max<int64_t>(1, most / panel_bytes);
    const int64_t chunks = (cols / layout.columns() + panels - 1) / panels;
    chunk = up_to((cols + chunks - 1) / chunks, layout.columns());  // all about as many
  }
  stride = keeps_sums ? chunk : args.n;

  const auto part = [&](bool wanted, int64_t size) { return take_part(bytes, wanted, size); };
  starts = part(args.row_groups != kOneGroup,
                static_cast<int64_t>(sizeof(GroupStart)) * (args.row_groups + 1));
  qvalues = part(args.quantizes, (rounds ? 2 : 1) * rows * depth);
  row_factors = part(args.quantizes && !rounds, 4 * args.m * layout.scales());
  weight = part(library, (exact ? 1 : 2) * chunk * depth);
  col_factors = part(finishes, 4 * chunk);
  sums = part(keeps_sums, 4 * rows * chunk);
}

PackedSums::PackedSums(CublasLt& lt, LtHandle handle, const PackedMatmul& args, size_t workspace)
    : lt_(lt),
      handle_(handle),
      exact_(PackedWorkspace(args).exact),
      matmul_(lt),
      x_(lt) {
  const PackedWorkspace steps(args);
  if (steps.depth == 0) throw invalid_argument("k is 0: nothing is contracted");
  const size_t needed = steps.bytes + kWorkspaceAlignment;
  if (workspace < needed) {
    throw invalid_argument("workspace must have ", needed, " bytes, and some for cuBLASLt, got ",
                           workspace, ". Call the op of te_ffi_kernels, which knows the size.");
  }
  lt.check(lt.create_matmul(matmul_.place(), exact_ ? LtSums::kS32 : LtSums::kF32),
           "describing a matmul");
  lt.check(lt.set_number(matmul_.get(), LtNumber::kTurnA, 1), "describing a matmul");
  const auto layout = [&](OwnedLayout& owned, LtType type, int64_t rows, int64_t cols,
                          int64_t stride) {
    lt.check(lt.create_layout(owned.place(), type, rows, cols, stride), "describing a matrix");
  };
  const LtType wide = steps.wide == te::Float::kBF16 ? LtType::kBF16 : LtType::kF16;
  const LtType type = exact_ ? LtType::kS8 : wide;
  const LtType of_sums = exact_                                                ? LtType::kS32
                         : steps.finishes || args.y_dtype == te::Float::kF32 ? LtType::kF32
                                                                              : wide;
  layout(x_, type, steps.depth, steps.rows, steps.depth);
  const auto plan = [&](int64_t cols) {
    auto made = std::make_unique<Chunk>(lt);
    made->cols = cols;
    layout(made->weight, type, steps.depth, cols, steps.depth);
    layout(made->sums, of_sums, cols, steps.rows, steps.stride);
    if (!lt_choose(lt, handle, call(*made), workspace - needed, &made->algorithm,
                   &made->workspace)) {
      throw failed_precondition("cuBLASLt has no algorithm on this GPU for ", args.m, " rows with ",
                                "a packed weight[", args.layout.k, ", ", args.n,
                                "]; use the op of te_ffi_kernels.reference");
    }
    return made;
  };
  chunk_ = plan(steps.chunk);
  const int64_t rest = steps.cols % steps.chunk;
  if (rest != 0) last_ = plan(rest);
}

LtCall PackedSums::call(const Chunk& chunk) const {
  LtCall call;
  call.matmul = matmul_.get();
  call.a_layout = chunk.weight.get();
  call.b_layout = x_.get();
  call.out_layout = chunk.sums.get();
  return call;
}

size_t PackedSums::workspace() const {
  return last_ == nullptr ? chunk_->workspace : std::max(chunk_->workspace, last_->workspace);
}

void PackedSums::run(const void* x, const void* weight, int64_t cols, void* sums, char* workspace,
                     Stream stream) const {
  const Chunk& chunk = cols == chunk_->cols ? *chunk_ : *last_;
  const float one = 1.0f, zero = 0.0f;
  const int32_t exact_one = 1, exact_zero = 0;
  LtCall call = this->call(chunk);
  call.alpha = exact_ ? static_cast<const void*>(&exact_one) : &one;
  call.b = x;
  call.out = sums;
  call.a = weight;
  call.beta = exact_ ? static_cast<const void*>(&exact_zero) : &zero;
  const int status =
      lt_.multiply(handle_, call, chunk.algorithm, workspace, chunk.workspace, stream);
  check_run(lt_, status, "multiplying");
}

void packed_matmul(const PackedMatmul& args, const PackedSums* sums, void* given, size_t bytes,
                    Stream stream) {
  const PackedWorkspace steps(args);
  if (steps.empty) return;
  PackedMma mma;
  mma.x = args.x;
  mma.m = args.m;
  mma.n = args.n;
  mma.layout = args.layout;
  mma.weight = args.weight;
  mma.stack = args.stack;
  mma.y = args.y;
  mma.y_dtype = args.y_dtype;
  if (steps.bytes == 0) return multiply(mma, args, stream);
  if (steps.library) check_call(args, sums);
  char* workspace = align_workspace(given);
  const size_t needed = steps.bytes + (sums == nullptr ? 0 : sums->workspace());
  if (workspace - static_cast<char*>(given) + needed > bytes) {
    throw invalid_argument("workspace must have ", needed, " bytes, got ", bytes);
  }
  if (args.row_groups != kOneGroup) {
    mma.sizes = args.sizes;
    mma.row_groups = args.row_groups;
    mma.starts = reinterpret_cast<GroupStart*>(workspace + steps.starts);
  }
  auto* row_factors = reinterpret_cast<float*>(workspace + steps.row_factors);
  void* qvalues = workspace + steps.qvalues;
  if (args.quantizes) {
    packed_rows({args.x, args.x_dtype, args.m, args.layout.k, steps.rows, steps.depth,
                 args.layout.group, qvalues, steps.rounds ? nullptr : row_factors},
                stream);
    mma.x = qvalues;
    mma.x_scales = row_factors;
  }
  if (!steps.library) return multiply(mma, args, stream);
  const int64_t wide = args.y_dtype == te::Float::kF32 ? 4 : 2;
  for (int64_t first = 0; first < args.n; first += steps.chunk) {
    const int64_t cols = std::min(steps.chunk, steps.cols - first);
    PackedWeight weight = unpacked(args, steps);
    weight.weight += first / args.layout.columns() * args.layout.panel_bytes();
    weight.n = std::min(steps.chunk, args.n - first);
    weight.out = workspace + steps.weight;
    if (steps.finishes) weight.factors = reinterpret_cast<float*>(workspace + steps.col_factors);
    packed_unpack(weight, stream);
    char* out = static_cast<char*>(args.y) + first * wide;
    void* to = steps.keeps_sums ? workspace + steps.sums : out;
    sums->run(args.quantizes ? qvalues : args.x, weight.out, cols, to, workspace + steps.bytes,
              stream);
    if (!steps.finishes) continue;
    GemmFinish finish;
    finish.sums = to;
    finish.exact = steps.exact;
    finish.m = args.m;
    finish.n = weight.n;
    finish.stride = steps.stride;
    finish.out_stride = args.n;
    finish.per_lane = true;
    finish.lhs_scales = steps.exact ? row_factors : nullptr;
    finish.rhs_scales = weight.factors;
    finish.out = out;
    finish.dtype = args.y_dtype;
    gemm_finish(finish, stream);
  }
}

}  // namespace jaxtap::cuda
