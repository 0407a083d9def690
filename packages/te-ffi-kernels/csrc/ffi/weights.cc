// Handlers of the matmuls with packed weights, of packing, and of rows out of packed weights.

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/isa.h"
#include "ffi/call.h"
#include "ffi/pack_call.h"
#include "ffi/matmul_call.h"
#include "ffi/stack.h"
#include "matmul/matmul.h"
#include "matmul/pack.h"
#include "matmul/take.h"

namespace jaxtap::ffi {
namespace {

// Of activations in `Op`: one of int8, or as many as their dtype and number need.
template <class Op>
inline constexpr int kDigits = Op::kQuantizes ? 1 : 0;

int64_t Bytes(const Array& array) { return static_cast<int64_t>(byte_size(array.dtype)); }

// The matmul of `rows` rows of x from `begin` on, with one weight.
template <class Op>
void MultiplyRows(const Op& given, int64_t begin, int64_t rows, const Array& weight,
                  const Parallel& parallel) {
  const Array &x = given.x, &y = given.y;
  const MatmulConfig& config = given.config;
  Matmul args;
  args.x = static_cast<const char*>(x.data) + begin * config.layout.k * Bytes(x);
  args.x_dtype = x.dtype;
  args.m = rows;
  args.weights = {weight.data, weight.shape[0], weight.shape[1], config.n, config.layout};
  args.y = static_cast<char*>(y.data) + begin * config.n * Bytes(y);
  args.y_dtype = y.dtype;
  args.bias = given.bias;  // to rows in groups nothing is added
  args.residual = given.residual;
  args.clamps = config.clamps;
  args.least = config.least;
  args.most = config.most;
  args.digits = kDigits<Op>;
  args.rotation = {given.signs, config.rotation};
  args.x_scale = given.x_scale;
  matmul(args, parallel, selected_isa());
}

// Where the rows of each group end, of `rows` rows of x in all. Throws for sizes that are negative.
// Rows that there are not are left out of the last groups.
inline std::vector<int64_t> EndsOfGroups(const int32_t* sizes, int64_t groups, int64_t rows) {
  std::vector<int64_t> ends;
  int64_t end = 0;
  for (int64_t group = 0; group < groups; ++group) {
    if (sizes[group] < 0) {
      throw invalid_argument("group_sizes[", group, "] must be at least 0, got ", sizes[group]);
    }
    end = std::min(rows, end + sizes[group]);
    ends.push_back(end);
  }
  return ends;
}

// Rows beyond the last group give zeros.
template <class Op>
void MultiplyGroups(const Op& given, const Parallel& parallel) {
  const int64_t rows = given.x.shape[0];
  // All sizes are checked before anything is multiplied.
  const std::vector<int64_t> ends = EndsOfGroups(given.group_sizes, given.groups, rows);
  int64_t begin = 0;
  for (size_t group = 0; group < ends.size(); ++group) {
    if (ends[group] > begin) {
      MultiplyRows(given, begin, ends[group] - begin, OneOf(given.buffer, given.index[group]),
                   parallel);
    }
    begin = ends[group];
  }
  const int64_t row = given.config.n * Bytes(given.y);
  if (row * (rows - begin) == 0) return;
  std::memset(static_cast<char*>(given.y.data) + begin * row, 0,
              static_cast<size_t>((rows - begin) * row));
}

template <class Op>
void Multiply(const Op& given, const Parallel& parallel) {
  if (given.config.grouped) return MultiplyGroups(given, parallel);
  const Array weight = given.config.stacked ? OneOf(given.buffer, *given.index) : given.buffer;
  MultiplyRows(given, 0, given.x.shape[0], weight, parallel);
}

template <class Op>
void Pack(const Op& given, const Parallel& parallel) {
  const Array& out = given.buffer;
  pack(static_cast<const int8_t*>(given.qvalues.data), given.scale.data, given.qvalues.shape[1],
       given.layout, static_cast<uint8_t*>(out.data), out.shape[0], out.shape[1], parallel,
       given.column_scales);
}

struct TakeCall {
  static constexpr char kTarget[] = "te_ffi_kernels.packed_take";
  struct Config : MatmulConfig {
    explicit Config(const Attributes& attributes)
        : MatmulConfig(attributes, static_cast<int>(NeedAttribute<int64_t>(attributes, "bits"))),
          columns(NeedAttribute<int64_t>(attributes, "axis") == 1) {}

    bool columns;
  };

  explicit TakeCall(const Call& call) {
    const auto config = ConfigOf<Config>(call, 2, 1);
    const Array weight = call.Operand(0, "buffer"), indices = call.Operand(1, "indices");
    const Array out = call.Result(0, "taken");
    weight.NeedRank(2).NeedDtype({DType::U8});
    indices.NeedRank(1).NeedDtype({DType::S32});
    out.NeedDtype({DType::F32, DType::BF16, DType::F16})
        .NeedShape({indices.shape[0], config.columns ? config.layout.k : config.n},
                   "the indices and the other axis of the weight");
    args.columns = config.columns;
    args.weights = {weight.data, weight.shape[0], weight.shape[1], config.n, config.layout};
    args.indices = static_cast<const int32_t*>(indices.data);
    args.count = indices.shape[0];
    args.out = out.data;
    args.dtype = out.dtype;
  }

  Take args;
};

template <const char* kName, int kBits, int kActivationBits,
          class Op = MatmulCall<kName, kBits, kActivationBits>>
using MatmulHandlers = Handlers<Op, Multiply<Op>>;
template <class Op>
using Packing = Handlers<Op, Pack<Op>>;

const MatmulHandlers<kGemmW8A8, 8, 8> kW8A8;
const MatmulHandlers<kGemmW8A16, 8, 16> kW8A16;
const MatmulHandlers<kGemmW4A8, 4, 8> kW4A8;
const MatmulHandlers<kGemmW4A16, 4, 16> kW4A16;
const Packing<PackCall<kPackW8, 8>> kPack8;
const Packing<PackCall<kPackW4, 4>> kPack4;
const Handlers<TakeCall, take> kTake;

}  // namespace
}  // namespace jaxtap::ffi
