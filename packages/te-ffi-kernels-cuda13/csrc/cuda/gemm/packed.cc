// As in plan.cc, what is a row to XLA is a column to cuBLASLt: A is the weight, B is x.
#include "cuda/gemm/packed.h"

#include "common/error.h"
#include "cuda/gemm/choose.h"
#include "cuda/gemm/steps.h"
#include "cuda/kernels/gemm.h"
#include "cuda/kernels/gemv.h"
#include "cuda/kernels/packed.h"

namespace jaxtap::cuda {
namespace {

size_t size_of(const PackedProduct& args) {
  return args.quantizes ? 1 : args.x_dtype == te::Float::kF32 ? 4 : 2;
}

PackedWeight unpacked(const PackedProduct& args) {
  PackedWeight weight;
  weight.weight = args.weight;
  weight.layout = args.layout;
  weight.n = args.n;
  weight.as_codes = args.quantizes;
  weight.dtype = args.x_dtype;
  return weight;
}

void few_floats(const PackedProduct& args, Stream stream) {
  Gemv gemv;
  gemv.x = args.x;
  gemv.x_dtype = args.x_dtype;
  gemv.m = args.m;
  gemv.n = args.n;
  gemv.layout = args.layout;
  gemv.weight = args.weight;
  gemv.y = args.y;
  gemv.y_dtype = args.y_dtype;
  jaxtap::cuda::gemv(gemv, stream);
}

void check_call(const PackedProduct& args, const PackedSums* sums) {
  if (sums == nullptr) throw failed_precondition("the product has no plan");
  for (const void* address : {args.x, const_cast<const void*>(args.y)}) {
    if (reinterpret_cast<uintptr_t>(address) % kLtAlignment != 0) {
      throw invalid_argument("an array begins at ", address, ", which isn't a multiple of ",
                             kLtAlignment, "; XLA's arrays are");
    }
  }
}

}  // namespace

PackedSteps::PackedSteps(const PackedProduct& args) {
  const PanelLayout& layout = args.layout;
  if (args.quantizes && args.layout.group == 0 && args.layout.k > kMostExact) {
    throw invalid_argument("sums of ", args.layout.k, " products of int8 don't fit in int32; there may ",
                           "be ", kMostExact, ", or groups");
  }
  empty = args.m == 0 || args.n == 0;
  few = args.m <= kFewRows;
  library = !few && !(args.quantizes && args.layout.group != 0);
  parts = packed_parts(unpacked(args));
  depth = args.quantizes ? layout.padded_k() : args.layout.k;
  cols = panel_count(args.n, layout.columns()) * layout.columns();
  rows = library && args.quantizes ? up_to(args.m, kInt8Rows) : args.m;
  keeps_sums = library && (args.y_dtype != te::Float::kF32 || cols != args.n || rows != args.m);

  const auto part = [&](bool wanted, int64_t size) {
    const size_t begin = bytes, section = kSection;
    if (wanted) bytes += (static_cast<size_t>(size) + section - 1) / section * section;
    return begin;
  };
  codes = part(args.quantizes, rows * depth);
  const int64_t factors = args.quantizes ? layout.scales() : 1;
  row_factors = part(args.quantizes || library, 4 * args.m * factors);
  weight = part(library, static_cast<int64_t>(size_of(args)) * parts * cols * depth);
  col_factors = part(library, 4 * cols);
  sums = part(keeps_sums, 4 * rows * cols);
}

PackedSums::PackedSums(CublasLt& lt, LtHandle handle, const PackedProduct& args, size_t workspace)
    : lt_(lt),
      handle_(handle),
      exact_(args.quantizes),
      parts_(PackedSteps(args).parts),
      part_bytes_(size_of(args) *
                  static_cast<size_t>(PackedSteps(args).cols * PackedSteps(args).depth)),
      product_(lt),
      weight_(lt),
      x_(lt),
      sums_(lt) {
  const PackedSteps steps(args);
  if (steps.depth == 0) throw invalid_argument("k is 0: nothing is contracted");
  const size_t needed = steps.bytes + kSection;
  if (workspace < needed) {
    throw invalid_argument("workspace has ", workspace, " bytes, and must have ", needed,
                           ", and some for cuBLASLt; call the op of te_ffi_kernels, which knows "
                           "the size");
  }
  lt.check(lt.create_product(product_.place(), exact_ ? LtSums::kS32 : LtSums::kF32),
           "describing a product");
  lt.check(lt.set_number(product_.get(), LtNumber::kTurnA, 1), "describing a product");
  const auto layout = [&](OwnedLayout& owned, LtType type, int64_t rows, int64_t cols) {
    lt.check(lt.create_layout(owned.place(), type, rows, cols, rows), "describing a matrix");
  };
  const LtType type = exact_                              ? LtType::kS8
                      : args.x_dtype == te::Float::kF32   ? LtType::kF32
                      : args.x_dtype == te::Float::kBF16  ? LtType::kBF16
                                                          : LtType::kF16;
  layout(weight_, type, steps.depth, steps.cols);
  layout(x_, type, steps.depth, steps.rows);
  layout(sums_, exact_ ? LtType::kS32 : LtType::kF32, steps.cols, steps.rows);
  LtCall call;
  call.product = product_.get();
  call.a_layout = weight_.get();
  call.b_layout = x_.get();
  call.out_layout = sums_.get();
  if (!lt_choose(lt, handle, call, workspace - needed, &algorithm_, &workspace_)) {
    throw failed_precondition("cuBLASLt has no algorithm on this GPU for ", args.m, " rows with ",
                              "a packed weight[", args.layout.k, ", ", args.n,
                              "]; use the op of te_ffi_kernels.reference");
  }
}

void PackedSums::run(const void* x, const void* weight, void* sums, char* workspace,
                     Stream stream) const {
  const float one = 1.0f, zero = 0.0f;
  const int32_t exact_one = 1, exact_zero = 0;
  LtCall call;
  call.product = product_.get();
  call.a_layout = weight_.get();
  call.b_layout = x_.get();
  call.out_layout = sums_.get();
  call.alpha = exact_ ? static_cast<const void*>(&exact_one) : &one;
  call.b = x;
  call.out = sums;
  for (int part = 0; part < parts_; ++part) {
    call.a = static_cast<const char*>(weight) + static_cast<size_t>(part) * part_bytes_;
    call.beta = exact_ ? static_cast<const void*>(&exact_zero) : part == 0 ? &zero : &one;
    const int status = lt_.multiply(handle_, call, algorithm_, workspace, workspace_, stream);
    if (status != 0) runtime().clear_error();
    lt_.check(status, "multiplying");
  }
}

void packed_product(const PackedProduct& args, const PackedSums* sums, void* given, size_t bytes,
                    Stream stream) {
  const PackedSteps steps(args);
  if (steps.empty) return;
  if (steps.bytes == 0) return few_floats(args, stream);
  if (steps.library) check_call(args, sums);
  char* workspace = section_of(given);
  const size_t needed = steps.bytes + (sums == nullptr ? 0 : sums->workspace());
  if (workspace - static_cast<char*>(given) + needed > bytes) {
    throw invalid_argument("workspace has ", bytes, " bytes, and the product needs ", needed);
  }
  auto* row_factors = reinterpret_cast<float*>(workspace + steps.row_factors);
  auto* codes = reinterpret_cast<int8_t*>(workspace + steps.codes);
  if (args.quantizes) {
    packed_rows({args.x, args.x_dtype, args.m, args.layout.k, steps.rows, steps.depth,
                 args.layout.group, codes, row_factors},
                stream);
  } else {
    packed_finite({args.x, args.x_dtype, args.m, args.layout.k, row_factors}, stream);
  }
  if (!steps.library) {
    const PackedDot dot = {codes,       row_factors, args.m, args.n,
                           args.layout, args.weight, args.y, args.y_dtype};
    return steps.few ? packed_dot(dot, stream) : packed_tiles(dot, stream);
  }
  PackedWeight weight = unpacked(args);
  weight.out = workspace + steps.weight;
  weight.factors = reinterpret_cast<float*>(workspace + steps.col_factors);
  packed_unpack(weight, stream);
  void* to = steps.keeps_sums ? workspace + steps.sums : args.y;
  sums->run(args.quantizes ? codes : args.x, weight.out, to, workspace + steps.bytes, stream);
  GemmFinish finish;
  finish.sums = to;
  finish.exact = args.quantizes;
  finish.m = args.m;
  finish.n = args.n;
  finish.stride = steps.cols;
  finish.per_lane = true;
  finish.lhs_scales = row_factors;
  finish.rhs_scales = weight.factors;
  finish.out = args.y;
  finish.dtype = args.y_dtype;
  gemm_finish(finish, stream);
}

}  // namespace jaxtap::cuda
