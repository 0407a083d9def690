// Handler of attention over a cache.

#include "decode/decode.h"
#include "ffi/call.h"
#include "ffi/stack.h"

namespace jaxtap::ffi {
namespace {

using decode::Attention;

struct DecodeConfig {
  explicit DecodeConfig(const Attributes& attributes)
      : scale(static_cast<float>(NeedAttribute<double>(attributes, "scale"))),
        softcap(static_cast<float>(NeedAttribute<double>(attributes, "softcap"))),
        window(NeedAttribute<int64_t>(attributes, "window")),
        scaled(NeedAttribute<bool>(attributes, "scaled")),
        masked(NeedAttribute<bool>(attributes, "masked")),
        causal(NeedAttribute<bool>(attributes, "causal")),
        heads_first(NeedAttribute<bool>(attributes, "heads_first")),
        stacked(AttributeOr<bool>(attributes, "stacked", false)) {
    if (window < 0) throw invalid_argument("window must be at least 0, got ", window);
    if (!(softcap >= 0)) throw invalid_argument("softcap must be at least 0, got ", softcap);
  }

  void Set(Attention& args) const {
    args.scale = scale;
    args.softcap = softcap;
    args.window = window;
    args.causal = causal;
    args.heads_first = heads_first;
  }

  float scale, softcap;
  int64_t window;
  bool scaled;  // the cache has scales
  bool masked;
  bool causal;
  bool heads_first;
  bool stacked;  // the cache is one of several, and its index the last operand
};

struct DecodeCall {
  static constexpr char kTarget[] = "te_ffi_kernels.decode_attention";
  using Config = DecodeConfig;

  explicit DecodeCall(const Call& call) {
    const Config config(call.attributes);
    const int64_t last = 4 + 2 * config.scaled + config.masked;
    call.NeedCounts(last + config.stacked, 1);
    int32_t index = 0;
    if (config.stacked) {
      const Array given = call.Operand(last, "index");
      given.NeedDtype({DType::S32}).NeedShape({}, "that of a scalar");
      index = *static_cast<const int32_t*>(given.data);
    }
    const auto cached = [&](int64_t operand, const char* name) {
      const Array given = call.Operand(operand, name);
      return config.stacked ? OneOf(given, index) : given;
    };
    const Array q = call.Operand(0, "q"), keys = cached(1, "keys");
    const Array values = cached(2, "values"), lengths = call.Operand(3, "lengths");
    const Array out = call.Result(0, "out");
    q.NeedRank(5).NeedDtype({DType::F32, DType::BF16, DType::F16});
    keys.NeedRank(4).NeedDtype({DType::F32, DType::BF16, DType::F16, DType::S8});
    config.Set(args);
    args.batch = q.shape[0];
    args.queries = q.shape[1];
    args.kv_heads = q.shape[2];
    args.group = q.shape[3];
    args.size = q.shape[4];
    args.positions = keys.shape[config.heads_first ? 2 : 1];
    // The second and third axis of the cache.
    const int64_t first = config.heads_first ? args.kv_heads : args.positions;
    const int64_t second = config.heads_first ? args.positions : args.kv_heads;
    keys.NeedShape({args.batch, first, second, args.size},
                   "the batch, the heads of keys, any positions and the size of a head of q");
    values.NeedDtype({keys.dtype}).NeedShape({args.batch, first, second, args.size}, "that of keys");
    lengths.NeedDtype({DType::S32}).NeedShape({args.batch}, "the batch");
    out.NeedDtype({DType::F32, DType::BF16, DType::F16})
        .NeedShape({args.batch, args.queries, args.kv_heads, args.group, args.size}, "that of q");
    args.q = q.data;
    args.q_dtype = q.dtype;
    args.keys = keys.data;
    args.values = values.data;
    args.cache_dtype = keys.dtype;
    args.lengths = static_cast<const int32_t*>(lengths.data);
    args.out = out.data;
    args.out_dtype = out.dtype;
    if (config.scaled != (keys.dtype == DType::S8)) {
      throw invalid_argument("keys must have scales if they are int8, and then alone, got ",
                             keys.Text());
    }
    if (config.scaled) {
      const Array of_keys = cached(4, "key_scale"), of_values = cached(5, "value_scale");
      for (const Array& scale : {of_keys, of_values}) {
        scale.NeedDtype({DType::F32})
            .NeedShape({args.batch, first, second}, "that of keys but for the last");
      }
      args.key_scales = static_cast<const float*>(of_keys.data);
      args.value_scales = static_cast<const float*>(of_values.data);
    }
    if (config.masked) {
      const Array mask = call.Operand(4 + 2 * config.scaled, "mask");
      mask.NeedRank(3).NeedDtype({DType::PRED});
      args.mask_batch = mask.shape[0];
      args.mask_queries = mask.shape[1];
      if ((args.mask_batch != 1 && args.mask_batch != args.batch) ||
          (args.mask_queries != 1 && args.mask_queries != args.queries) ||
          mask.shape[2] != args.positions) {
        throw invalid_argument("mask must be [", args.batch, " or 1, ", args.queries, " or 1, ",
                               args.positions, "], got ", mask.Text());
      }
      args.mask = static_cast<const uint8_t*>(mask.data);
    }
  }

  Attention args;
};

const Handlers<DecodeCall, decode::attend> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
