// Handlers of gemm_v2 and of the deprecated gemm, with Transformer Engine's arguments, results and
// attributes. gemm_v2's config may have one member more: fuse_gelu.

#include <cstring>
#include <optional>
#include <vector>

#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_arguments.h"
#include "ffi/threads.h"
#include "te/gemm.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

constexpr char kV2[] = "te_ffi_kernels.gemm_v2";
constexpr char kV1[] = "te_ffi_kernels.gemm";

template <typename T>
T Required(const xffi::Dictionary& attributes, const char* name) {
  if (attributes.contains(name)) {
    const auto value = attributes.get<T>(name);
    if (value.has_value()) return *value;
  }
  throw invalid_argument("attribute ", name, " is missing, or of another type than it must have");
}

struct Config {
  explicit Config(const xffi::Dictionary& attributes)
      : scaling(te::scaling_of(Required<int64_t>(attributes, "scaling_mode"))),
        lhs_axis(Required<int64_t>(attributes, "lhs_axis_boundary")),
        rhs_axis(Required<int64_t>(attributes, "rhs_axis_boundary")),
        lhs_transposed(Required<bool>(attributes, "lhs_transposed")),
        rhs_transposed(Required<bool>(attributes, "rhs_transposed")) {
    // Sums are in float32 in any case.
    Required<bool>(attributes, "use_split_accumulator");
    const auto collective = Required<int64_t>(attributes, "collective_op");
    if (collective != 0) {
      throw invalid_argument("collective_op is ", collective,
                             ", and must be 0 (none): products that communicate are for GPUs; "
                             "shard the operands and let XLA communicate");
    }
  }

  static Config V2(const xffi::Dictionary& attributes) {
    const auto dictionary = Required<xffi::Dictionary>(attributes, "config");
    Config config(dictionary);
    config.gelu = dictionary.contains("fuse_gelu") && Required<bool>(dictionary, "fuse_gelu");
    return config;
  }

  static Config V1(const xffi::Dictionary& attributes) {
    Config config(attributes);
    config.bias = Required<bool>(attributes, "fuse_bias");
    config.gelu = Required<bool>(attributes, "fuse_gelu");
    config.grad = Required<bool>(attributes, "grad");
    return config;
  }

  Scaling scaling;
  int64_t lhs_axis, rhs_axis;
  bool lhs_transposed, rhs_transposed;
  bool bias = false, gelu = false, grad = false;
};

void Warm(const Config& config) {
  constexpr int64_t kSide = te::kTile;
  std::vector<float> numbers(kSide * kSide, 1.0f), out(kSide * kSide), scales(kSide, 1.0f);
  te::Gemm args;
  args.m = args.n = args.k = kSide;
  const bool codes = config.scaling != Scaling::kNone;
  for (te::Factor* factor : {&args.lhs, &args.rhs}) {
    factor->data = numbers.data();
    factor->dtype = codes ? DType::F8E4M3FN : DType::F32;
    factor->scales = codes ? scales.data() : nullptr;
  }
  args.scaling = config.scaling;
  args.lhs.lanes_first = !config.lhs_transposed;
  args.rhs.lanes_first = config.rhs_transposed;
  args.out = out.data();
  args.gelu = config.gelu && !config.grad;
  te::gemm(args, Parallel());
}

// One factor: its lanes and k, and its scales checked.
struct Side {
  Side(const Array& data, const Array& scales, int64_t axis, const char* axis_name,
       bool lanes_first, Scaling scaling) {
    const Matrix matrix = Flatten(data, axis, axis_name);
    lanes = lanes_first ? matrix.rows : matrix.cols;
    k = lanes_first ? matrix.cols : matrix.rows;
    factor.data = data.data;
    factor.dtype = data.dtype;
    factor.lanes_first = lanes_first;
    if (scaling == Scaling::kNone) {
      NeedFloat(data);
      return;
    }
    NeedCodes(data, scaling);
    NeedScales(scales, scaling);
    if (scaling == Scaling::kMx) {
      NeedBlocks(data, k, "contracted axes");
      NeedSize(scales, lanes * k / te::kBlock, "one for 32 codes");
    } else if (scaling == Scaling::kChannel) {
      NeedSize(scales, lanes, "one for each row or column of the result");
    } else {
      NeedSize(scales, 1, "the scale of all codes");
    }
    factor.scales = scales.data;
  }

  int64_t lanes, k;
  te::Factor factor;
};

float Number(const Array& array) {
  NeedSize(array.NeedDtype({DType::F32}), 1, "a factor");
  return *static_cast<const float*>(array.data);
}

struct Operands {
  Array lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, alpha, beta, out;
  std::optional<Array> gelu_input, bias_grad, pre_gelu_out;  // of the deprecated gemm
};

void Execute(const Config& config, xffi::ThreadPool pool, const Operands& given) {
  const Side lhs(given.lhs, given.lhs_scale_inv, config.lhs_axis, "lhs_axis_boundary",
                 !config.lhs_transposed, config.scaling);
  const Side rhs(given.rhs, given.rhs_scale_inv, config.rhs_axis, "rhs_axis_boundary",
                 config.rhs_transposed, config.scaling);
  const DType left = given.lhs.dtype, right = given.rhs.dtype;
  const bool floats = config.scaling == Scaling::kNone;
  if ((floats || left == DType::S8 || right == DType::S8) && left != right) {
    throw invalid_argument("rhs is ", given.rhs.Text(), ", and must be of ", jaxtap::name(left),
                           " like lhs");
  }
  if (left == DType::F8E5M2 && right == DType::F8E5M2) {
    throw invalid_argument("lhs and rhs are both float8_e5m2; one of them must be float8_e4m3fn");
  }
  if (lhs.k != rhs.k) {
    throw invalid_argument("rhs is ", given.rhs.Text(), " with ", rhs.k,
                           " contracted, and must have the ", lhs.k, " of lhs, ",
                           given.lhs.Text());
  }
  if (left == DType::S8 && lhs.k > te::kMostInt8) {
    throw invalid_argument("lhs is ", given.lhs.Text(), " with ", lhs.k,
                           " contracted; sums of int8 codes are exact up to ", te::kMostInt8);
  }
  const float beta = Number(given.beta);
  if (beta != 0.0f) {
    throw invalid_argument("beta is ", beta, ", and must be 0: the result has no value before");
  }
  NeedFloat(given.out);
  NeedSize(given.out, lhs.lanes * rhs.lanes, "rows of lhs times columns of rhs");

  te::Gemm args;
  args.m = lhs.lanes;
  args.n = rhs.lanes;
  args.k = lhs.k;
  args.scaling = config.scaling;
  args.lhs = lhs.factor;
  args.rhs = rhs.factor;
  args.alpha = Number(given.alpha);
  args.out = given.out.data;
  args.out_dtype = te::float_of(given.out.dtype);
  const auto of_result = [&](const Array& array, int64_t size, const char* meaning) {
    NeedSize(array.NeedDtype({given.out.dtype}), size, meaning);
    return array.data;
  };
  if (given.bias.size() > 0 && !config.grad) {
    args.bias = of_result(given.bias, args.n, "one for each column of the result, or none");
  } else if (config.bias && !config.grad && args.n > 0) {
    throw invalid_argument("bias is ", given.bias.Text(), ", and fuse_bias needs ", args.n,
                           " numbers");
  }
  if (given.gelu_input.has_value()) {
    if (config.gelu && config.grad) {
      args.gelu_input = of_result(*given.gelu_input, args.m * args.n, "as the result");
    } else if (config.gelu) {
      args.before_gelu = of_result(*given.pre_gelu_out, args.m * args.n, "as the result");
    }
    if (config.bias && config.grad) {
      args.bias_grad = of_result(*given.bias_grad, args.n, "one for each column of the result");
    } else {
      std::memset(given.bias_grad->data, 0,
                  static_cast<size_t>(given.bias_grad->size()) * byte_size(given.bias_grad->dtype));
    }
  }
  args.gelu = config.gelu && !config.grad;
  XlaScheduler scheduler(pool);
  te::gemm(args, Parallel(scheduler));
  // The gradient passes on what it was given.
  if (args.gelu_input != nullptr && given.pre_gelu_out->data != args.gelu_input) {
    of_result(*given.pre_gelu_out, args.m * args.n, "as the result");
    std::memcpy(given.pre_gelu_out->data, args.gelu_input,
                static_cast<size_t>(args.m * args.n) * byte_size(given.out.dtype));
  }
}

XLA_FFI_DEFINE_HANDLER(kV2Instantiate,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kV2, [&] { Warm(Config::V2(attributes)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kV2Execute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer lhs, xffi::AnyBuffer lhs_scale_inv,
       xffi::AnyBuffer rhs, xffi::AnyBuffer rhs_scale_inv, xffi::AnyBuffer bias,
       xffi::AnyBuffer alpha, xffi::AnyBuffer beta, xffi::Result<xffi::AnyBuffer> out,
       xffi::Result<xffi::AnyBuffer>, xffi::Dictionary attributes) {
      return Guarded(kV2, [&] {
        Execute(Config::V2(attributes), pool,
                {Read("lhs", lhs), Read("lhs_scale_inv", lhs_scale_inv), Read("rhs", rhs),
                 Read("rhs_scale_inv", rhs_scale_inv), Read("bias", bias), Read("alpha", alpha),
                 Read("beta", beta), Read("output", out), {}, {}, {}});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // lhs
        .Arg<xffi::AnyBuffer>()  // lhs_scale_inv
        .Arg<xffi::AnyBuffer>()  // rhs
        .Arg<xffi::AnyBuffer>()  // rhs_scale_inv
        .Arg<xffi::AnyBuffer>()  // bias
        .Arg<xffi::AnyBuffer>()  // alpha
        .Arg<xffi::AnyBuffer>()  // beta
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attrs());

const Registration kV2Registration({kV2, kV2Instantiate, kV2Execute});

XLA_FFI_DEFINE_HANDLER(kV1Instantiate,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kV1, [&] { Warm(Config::V1(attributes)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kV1Execute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer lhs, xffi::AnyBuffer lhs_scale_inv,
       xffi::AnyBuffer rhs, xffi::AnyBuffer rhs_scale_inv, xffi::AnyBuffer bias,
       xffi::AnyBuffer gelu_input, xffi::AnyBuffer alpha, xffi::AnyBuffer beta,
       xffi::Result<xffi::AnyBuffer> out, xffi::Result<xffi::AnyBuffer> bias_grad,
       xffi::Result<xffi::AnyBuffer> pre_gelu_out, xffi::Result<xffi::AnyBuffer>,
       xffi::Dictionary attributes) {
      return Guarded(kV1, [&] {
        Execute(Config::V1(attributes), pool,
                {Read("lhs", lhs), Read("lhs_scale_inv", lhs_scale_inv), Read("rhs", rhs),
                 Read("rhs_scale_inv", rhs_scale_inv), Read("bias", bias), Read("alpha", alpha),
                 Read("beta", beta), Read("output", out), Read("gelu_input", gelu_input),
                 Read("bias_grad", bias_grad), Read("pre_gelu_out", pre_gelu_out)});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // lhs
        .Arg<xffi::AnyBuffer>()  // lhs_scale_inv
        .Arg<xffi::AnyBuffer>()  // rhs
        .Arg<xffi::AnyBuffer>()  // rhs_scale_inv
        .Arg<xffi::AnyBuffer>()  // bias
        .Arg<xffi::AnyBuffer>()  // gelu_input
        .Arg<xffi::AnyBuffer>()  // alpha
        .Arg<xffi::AnyBuffer>()  // beta
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // bias_grad
        .Ret<xffi::AnyBuffer>()  // pre_gelu_out
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attrs());

const Registration kV1Registration({kV1, kV1Instantiate, kV1Execute});

}  // namespace
}  // namespace jaxtap::ffi
