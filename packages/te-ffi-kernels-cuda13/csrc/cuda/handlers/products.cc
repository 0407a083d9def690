// Handlers of products with packed weights: gemm_w8a8, gemm_w8a16, gemv_w8 and gemv_w4.

#include "cuda/gemm/handles.h"
#include "cuda/gemm/packed.h"
#include "cuda/handlers/planned.h"
#include "ffi/product_call.h"
#include "te/modes.h"

namespace jaxtap::cuda {
namespace {

constexpr char kGemmW8A8[] = "te_ffi_kernels.gemm_w8a8";
constexpr char kGemmW8A16[] = "te_ffi_kernels.gemm_w8a16";
constexpr char kGemvW8[] = "te_ffi_kernels.gemv_w8";
constexpr char kGemvW4[] = "te_ffi_kernels.gemv_w4";

template <int kBits>
void Check(const xffi::Dictionary& attributes) {
  ffi::ProductConfigOf(attributes, kBits).Check();
}

// What a call is given: read, and checked.
template <int kBits, bool kQuantizes>
struct Product {
  explicit Product(const Call& call) : workspace(Workspace(call)) {
    const ffi::ProductConfig config = ffi::ProductConfigOf(call.attributes, kBits);
    const Array x = call.Operand(0, "x"), weight = call.Operand(1, "buffer");
    const Array y = call.Result(0, "y");
    ffi::ProductCall{x, weight, y}.Check(config);
    weight.NeedShape({panel_count(config.n), config.Check().panel_bytes()},
                     "panels of 16 columns and the bytes of one");
    args.x = x.data;
    args.x_dtype = te::float_of(x.dtype);
    args.m = x.shape[0];
    args.k = config.k;
    args.n = config.n;
    args.group = config.group;
    args.bits = kBits;
    args.quantizes = kQuantizes;
    args.weight = static_cast<const uint8_t*>(weight.data);
    args.y = y.data;
    args.y_dtype = te::float_of(y.dtype);
  }

  static Array Workspace(const Call& call) {
    call.NeedCounts(2, 2);
    const Array found = call.Result(1, "workspace");
    found.NeedDtype({DType::U8});
    return found;
  }

  size_t bytes() const { return static_cast<size_t>(workspace.size()); }

  Array workspace;
  PackedProduct args;
};

// A plan, or nothing where cuBLASLt has no part.
struct Planned : Kept {
  std::unique_ptr<PackedSums> sums;
};

template <int kBits, bool kQuantizes>
std::unique_ptr<Planned> Make(const Call& call, int device) {
  const Product<kBits, kQuantizes> product(call);
  const PackedSteps steps(product.args);
  auto made = std::make_unique<Planned>();
  if (steps.empty || !steps.library) return made;
  CublasLt& lt = cublaslt();
  const LtHandle handle = lt_handles().of(lt, runtime(), device);
  made->sums = std::make_unique<PackedSums>(lt, handle, product.args, product.bytes());
  return made;
}

template <int kBits, bool kQuantizes>
void Body(const Call& call, Planned& planned) {
  const Product<kBits, kQuantizes> product(call);
  packed_product(product.args, planned.sums.get(), product.workspace.data, product.bytes(),
                 call.stream);
}

template <const char* kName, int kBits, bool kQuantizes>
using Products =
    PlannedHandlers<kName, Check<kBits>, Planned, Make<kBits, kQuantizes>, Body<kBits, kQuantizes>>;

const Products<kGemmW8A8, 8, true> kOne;
const Products<kGemmW8A16, 8, false> kTwo;
const Products<kGemvW8, 8, false> kThree;
const Products<kGemvW4, 4, false> kFour;

}  // namespace
}  // namespace jaxtap::cuda
