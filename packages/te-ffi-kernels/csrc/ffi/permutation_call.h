// What calls that move tokens to experts and back are given, checked, whatever platform they run
// on.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "permutation/permutation.h"

namespace jaxtap::ffi {

inline void NeedMatrix(const Array& array, int64_t rows, const char* rows_are) {
  array.NeedRank(2);
  if (array.shape[0] == rows) return;
  throw invalid_argument(array.name, " must have ", rows, " rows, ", rows_are, ", got ",
                         array.Text());
}

struct MakeRowMapCall {
  static constexpr char kTarget[] = "te_ffi_kernels.make_row_id_map";
  using Config = NoConfig;

  template <class Call>
  explicit MakeRowMapCall(const Call& call) {
    call.NeedCounts(1, 2);
    const Array routed = call.Operand(0, "routing_map"), entries = call.Result(0, "row_id_map");
    const Array counts = call.Result(1, "tokens_per_expert");
    routed.NeedRank(2).NeedDtype({DType::PRED, DType::U8});
    args.tokens = routed.shape[0];
    args.experts = routed.shape[1];
    entries.NeedDtype({DType::S32});
    NeedSize(entries, args.tokens * (2 * args.experts + 1), "twice the experts and one per token");
    NeedSize(counts.NeedDtype({DType::S32}), args.experts, "one for each expert");
    args.routed = static_cast<const uint8_t*>(routed.data);
    args.entries = static_cast<int32_t*>(entries.data);
    args.counts = static_cast<int32_t*>(counts.data);
  }

  permutation::MakeRowMap args;
};

// A map of rows, of which `rows` there are. `pad_offsets` may be empty.
inline permutation::RowMap RowMapOf(const Array& entries, const Array& pad_offsets, int64_t rows) {
  entries.NeedRank(2).NeedDtype({DType::S32});
  if (entries.shape[1] % 2 == 0) {
    throw invalid_argument(entries.name, " must have twice the experts and one per token, got ",
                           entries.Text());
  }
  permutation::RowMap map;
  map.tokens = entries.shape[0];
  map.experts = entries.shape[1] / 2;
  map.rows = rows;
  map.entries = static_cast<const int32_t*>(entries.data);
  pad_offsets.NeedDtype({DType::S32});
  if (pad_offsets.size() > 0) {
    NeedSize(pad_offsets, map.experts, "one for each expert, or none");
    map.pad_offsets = static_cast<const int32_t*>(pad_offsets.data);
  }
  return map;
}

// Throws unless `probs` is empty or has one for each token and expert.
inline bool HasProbs(const Array& probs, const permutation::RowMap& map) {
  NeedFloat(probs);
  // Without tokens or experts both are true.
  if (probs.size() == 0) return false;
  NeedSize(probs, map.tokens * map.experts, "one for each token and expert, or none");
  return true;
}

struct PermuteCall {
  static constexpr char kTarget[] = "te_ffi_kernels.permute_with_mask_map";
  using Config = NoConfig;

  template <class Call>
  explicit PermuteCall(const Call& call) {
    call.NeedCounts(4, 2);
    const Array x = call.Operand(0, "inp"), entries = call.Operand(1, "row_id_map");
    const Array probs = call.Operand(2, "probs"), out = call.Result(0, "output");
    const Array permuted = call.Result(1, "permuted_probs");
    NeedFloat(x);
    out.NeedRank(2).NeedDtype({x.dtype});
    args.map = RowMapOf(entries, call.Operand(3, "pad_offsets"), out.shape[0]);
    NeedMatrix(x, args.map.tokens, "one for each token");
    NeedSize(out, args.map.rows * x.shape[1], "rows as those of inp");
    args.x = x.data;
    args.out = out.data;
    args.row_bytes = x.shape[1] * static_cast<int64_t>(byte_size(x.dtype));
    const bool has = HasProbs(probs, args.map);
    permuted.NeedDtype({probs.dtype});
    if (!has) {
      // Nothing, or rows that have no token.
      unwanted = permuted;
      return;
    }
    NeedSize(permuted, args.map.rows, "one for each row");
    args.probs = probs.data;
    args.permuted_probs = permuted.data;
    args.prob_bytes = static_cast<int64_t>(byte_size(probs.dtype));
  }

  permutation::Permute args;
  Array unwanted = {};  // a result to clear
};

struct UnpermuteCall {
  static constexpr char kTarget[] = "te_ffi_kernels.unpermute_with_mask_map";
  using Config = NoConfig;

  template <class Call>
  explicit UnpermuteCall(const Call& call)
      : config(ConfigOf<Config>(call, 5, 2)), factors(call.Operand(2, "merging_probs")) {
    const Array x = call.Operand(0, "inp"), entries = call.Operand(1, "row_id_map");
    const Array permuted = call.Operand(3, "permuted_probs"), out = call.Result(0, "output");
    const Array probs = call.Result(1, "unpermuted_probs");
    NeedFloat(x).NeedRank(2);
    args.map = RowMapOf(entries, call.Operand(4, "pad_offsets"), x.shape[0]);
    NeedMatrix(out.NeedDtype({x.dtype}), args.map.tokens, "one for each token");
    NeedSize(out, args.map.tokens * x.shape[1], "rows as those of inp");
    args.x = x.data;
    args.out = out.data;
    args.dtype = te::float_of(x.dtype);
    args.cols = x.shape[1];
    has_factors = HasProbs(factors, args.map);
    NeedFloat(permuted);
    probs.NeedDtype({permuted.dtype});
    if (permuted.size() == 0) {
      unwanted = probs;
      return;
    }
    NeedSize(permuted, args.map.rows, "one for each row, or none");
    NeedSize(probs, args.map.tokens * args.map.experts, "one for each token and expert");
    args.permuted_probs = permuted.data;
    args.probs = probs.data;
    args.prob_bytes = static_cast<int64_t>(byte_size(probs.dtype));
  }

  Config config;
  permutation::Unpermute args;  // without factors
  Array factors;
  bool has_factors = false;
  Array unwanted = {};  // a result to clear
};

struct UnpermuteGradientCall {
  static constexpr char kTarget[] = "te_ffi_kernels.unpermute_bwd_with_merging_probs";
  using Config = NoConfig;

  template <class Call>
  explicit UnpermuteGradientCall(const Call& call)
      : config(ConfigOf<Config>(call, 5, 2)),
        factors(call.Operand(3, "merging_probs")),
        factors_grad(call.Result(1, "probs_grad")) {
    const Array grad = call.Operand(0, "output_grad"), entries = call.Operand(1, "row_id_map");
    const Array x = call.Operand(2, "fwd_input"), x_grad = call.Result(0, "inp_grad");
    NeedFloat(x).NeedRank(2);
    args.map = RowMapOf(entries, call.Operand(4, "pad_offsets"), x.shape[0]);
    NeedMatrix(grad.NeedDtype({x.dtype}), args.map.tokens, "one for each token");
    NeedSize(grad, args.map.tokens * x.shape[1], "rows as those of fwd_input");
    NeedSize(x_grad.NeedDtype({x.dtype}), x.size(), "as fwd_input");
    NeedSize(NeedFloat(factors), args.map.tokens * args.map.experts,
             "one for each token and expert");
    NeedSize(factors_grad.NeedDtype({factors.dtype}), factors.size(), "as merging_probs");
    args.grad = grad.data;
    args.x = x.data;
    args.dtype = te::float_of(x.dtype);
    args.cols = x.shape[1];
    args.x_grad = x_grad.data;
  }

  Config config;
  permutation::UnpermuteGradient args;  // without factors and their gradient
  Array factors, factors_grad;
};

}  // namespace jaxtap::ffi
