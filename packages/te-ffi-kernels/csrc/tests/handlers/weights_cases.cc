// Calls of packing, of matmuls with packed weights, and of rows out of them.
#include "tests/handlers/cases.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

constexpr int64_t kRows = 3, kK = 64, kN = 40, kGroup = 32;

// float16 scales in 4 bits.
PanelLayout layout_of(int bits) {
  return bits == 4 ? panel_layout(kK, kGroup, 4, 16) : panel_layout(kK, kGroup, 8);
}

const Weights& weight_of(int bits, int index = 0) {
  static const auto* all = [] {
    std::mt19937 random(9);
    auto* made = new std::vector<Weights>;
    for (int i = 0; i < 6; ++i) made->push_back(random_weights(kN, layout_of(i < 3 ? 4 : 8), random));
    return made;
  }();
  return (*all)[static_cast<size_t>((bits == 8 ? 3 : 0) + index)];
}

double weight_at(const Weights& w, int64_t k, int64_t n) {
  return w.qvalue(k, n) * static_cast<double>(w.scale(k, n));
}

Tensor buffer_of(const Weights& w, int count = 1) {
  const int64_t panels = panel_count(kN, w.layout.columns()), bytes = w.layout.panel_bytes();
  Tensor made(kU8, {panels, bytes});
  if (count > 1) made.dims.insert(made.dims.begin(), count);
  made.bytes.clear();
  for (int i = 0; i < count; ++i) {
    const Buffer& from = weight_of(w.bits, i).buffer;
    made.bytes.insert(made.bytes.end(), from.get(), from.get() + from.size());
  }
  made.bytes.shrink_to_fit();
  return made;
}

Dictionary attributes(int bits) {
  Dictionary made{{"k", kK}, {"n", kN}, {"group", kGroup}};
  if (bits == 4) made.insert({"scale_kind", 1});
  return made;
}

const std::set<std::string> kOptional = {"scale_kind", "rotation", "index",   "group_sizes",
                                         "bias",       "residual", "clamps"};

// The matmul of row i of x with a weight.
double matmul_at(const Program& p, const Weights& w, int64_t i) {
  double sum = 0;
  for (int64_t k = 0; k < kK; ++k) {
    sum += number(p.operands[0], i / kN * kK + k) * weight_at(w, k, i % kN);
  }
  return sum;
}

struct Op {
  const char* name;
  int bits;
  double slack;  // of results
};

template <int kOp>
constexpr Op kOps = {};
template <>
constexpr Op kOps<0> = {"gemm_w8a8", 8, 0.5};
template <>
constexpr Op kOps<1> = {"gemm_w8a16", 8, 1e-3};
template <>
constexpr Op kOps<2> = {"gemm_w4a8", 4, 0.5};
template <>
constexpr Op kOps<3> = {"gemm_w4a16", 4, 1e-3};

// Makes a weight of a call another one, damaged. Quantized values are checked when a weight is
// first used at its address, and another test may have had the same weight at this one.
void damage(Program& p) {
  static std::mt19937 random(10);
  Tensor& buffer = p.operands[1];
  const int bits = buffer.dims[0] == panel_count(kN, layout_of(4).columns()) ? 4 : 8;
  const Weights w = random_weights(kN, layout_of(bits), random);
  std::copy(w.buffer.get(), w.buffer.get() + w.buffer.size(), buffer.bytes.begin());
  buffer.bytes[200] ^= 1;
}

const std::vector<Bad> kBad = {
    {set("k", -1), "k must be in [0, 2**31), got -1"},
    {set("k", 65), "group 32 does not divide k = 65"},
    {set("group", 7), "or a multiple of 8 up to 65536, got 7"},
    {set("n", -1), "n must be at least 0, got -1"},
    {operand(0, kF32, {kK}), "x must have 2 axes, got float32[64]"},
    {operand(0, kS8, {kRows, kK}), "x must ... got int8"},
    {operand(0, kF32, {kRows, 65}), "rows and the attribute k"},
    {operand(1, kU8, {3}), "axes"},
    {result(0, kF32, {kRows, 41}), "the rows of x and the attribute n"},
    {result(0, kS8, {kRows, kN}), "y must ... got int8"},
    {[](Program& p) { p.operands[1].bytes[0] ^= 1; }, "must begin with \"JTWP\""},
    {[](Program& p) { p.operands[1].bytes[9] ^= 1; }, "corrupted header"},
    {damage, "corrupted quantized values or scales"}};

std::vector<Bad> also(std::vector<Bad> more) {
  more.insert(more.end(), kBad.begin(), kBad.end());
  return more;
}

template <int kOp>
Case matmul_case() {
  constexpr Op op = kOps<kOp>;
  const Weights& w = weight_of(op.bits);
  return {{std::string("te_ffi_kernels.") + op.name,
           {normal({kRows, kK}), buffer_of(w)},
           {Tensor(kF32, {kRows, kN})},
           attributes(op.bits)},
          [](const Program& p) {
            constexpr Op op = kOps<kOp>;
            expect_close(p.results[0], op.name, [&](int64_t i) {
              return matmul_at(p, weight_of(op.bits), i);
            }, op.slack);
          },
          also({{operand(1, kU8, {1, 1}), "1"},
                {operand(1, kS8, buffer_of(w).dims), "buffer must ... got int8"}}),
          kOptional};
}

template <int kOp>
Case stack_case() {
  constexpr Op op = kOps<kOp>;
  Tensor index(kS32, {});
  index.as<int32_t>()[0] = -2;  // the second of three
  Dictionary given = attributes(op.bits);
  given.insert({"index", 1});
  return {{std::string("te_ffi_kernels.") + op.name,
           {normal({kRows, kK}), buffer_of(weight_of(op.bits), 3), index},
           {Tensor(kF32, {kRows, kN})},
           given},
          [](const Program& p) {
            constexpr Op op = kOps<kOp>;
            expect_close(p.results[0], op.name, [&](int64_t i) {
              return matmul_at(p, weight_of(op.bits, 1), i);
            }, op.slack);
          },
          {{operand(2, kS32, {1}), "that of a scalar"},
           {operand(2, kF32, {}), "index must ... got float32[]"},
           {[](Program& p) {
              p.operands[1].dims[0] = 0;
              p.operands[1].fit();
            },
            "must be a stack of one or more"},
           {operand(1, kU8, {2, 2}), "buffer must have 3 axes, got uint8[2, 2]"},
           {set("index", 2), "index must be 0 or 1, got 2"},
           {set("index", 0), "3 operands"},
           {set("group", 3), "got 3"}},
          kOptional};
}

// Rows times signs and the Hadamard matrix of each 16 numbers.
constexpr int64_t kBlock = 16;

Program rotated(const Program& p) {
  Program found = p;
  const Tensor& signs = p.operands.back();
  for (int64_t i = 0; i < kRows * kK; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < kBlock; ++j) {
      const int64_t from = i / kBlock * kBlock + j;
      const bool minus = __builtin_popcountll(static_cast<uint64_t>(i % kBlock & j)) % 2 != 0;
      sum += (minus ? -1 : 1) * number(p.operands[0], from) * number(signs, from % kK);
    }
    set_number(found.operands[0], i, sum / std::sqrt(static_cast<double>(kBlock)));
  }
  return found;
}

template <int kOp>
Case rotated_case(Case made, int index) {
  made.program.attributes.insert({"rotation", kBlock});
  Tensor signs(kS8, {kK});
  for (int64_t i = 0; i < kK; ++i) signs.as<int8_t>()[i] = i % 3 == 0 ? -1 : 1;
  made.program.operands.push_back(signs);
  const size_t last = made.program.operands.size() - 1;
  made.expect = [index](const Program& p) {
    constexpr Op op = kOps<kOp>;
    const Program turned = rotated(p);
    expect_close(p.results[0], op.name, [&](int64_t i) {
      return matmul_at(turned, weight_of(op.bits, index), i);
    }, op.slack);
  };
  made.bad = {{set("rotation", 1), "rotation must be 0 or a power of two"},
              {set("rotation", -2), "rotation must ... got -2"},
              {set("rotation", 128), "that divides k"},
              {operand(last, kS8, {kK + 1}), "the attribute k"},
              {operand(last, kF32, {kK}), "signs must ... got float32"}};
  return made;
}

template <int kOp>
Case rotated_matmul_case() { return rotated_case<kOp>(matmul_case<kOp>(), 0); }
template <int kOp>
Case rotated_stack_case() { return rotated_case<kOp>(stack_case<kOp>(), 1); }

// What `made` multiplies, plus operands after its own.
Case added_case(Case made, bool bias, bool residual) {
  Program& program = made.program;
  program.attributes.insert(
      {{"bias", int64_t{bias}}, {"residual", int64_t{residual}}, {"clamps", int64_t{0}}});
  const size_t first = program.operands.size(), last = first + (bias && residual);
  if (bias) program.operands.push_back(normal({kN}));
  if (residual) program.operands.push_back(normal({kRows, kN}));
  made.expect = [first, product = made.expect](const Program& p) {
    Program plain = p;
    plain.operands.erase(plain.operands.begin() + static_cast<std::ptrdiff_t>(first),
                         plain.operands.end());
    for (int64_t i = 0; i < kRows * kN; ++i) {
      double value = number(p.results[0], i);
      for (size_t one = first; one < p.operands.size(); ++one) {
        value -= number(p.operands[one], i % p.operands[one].size());
      }
      set_number(plain.results[0], i, value);
    }
    product(plain);
  };
  made.bad = {{set("bias", 2), "bias must be 0 or 1, got 2"},
              {set("residual", -1), "residual must be 0 or 1, got -1"},
              {[](Program& p) { p.attributes.at("bias") = p.attributes.at("residual") = 0; },
               "operands and 1 results, and there must be"},
              {result(0, kBF16, {kRows, kN}), "must be of: bfloat16, got float32"},
              {set("group", 3), "got 3"}};
  const auto refuse = [&](const char* name, size_t at, std::vector<int64_t> other,
                          const char* why) {
    made.bad.push_back({operand(at, kS32, other), std::string(name) + " must ... got int32"});
    made.bad.push_back({operand(at, kF32, other), std::string(name) + " must ... " + why});
  };
  if (bias) refuse("bias", first, {kN + 1}, "the attribute n");
  if (residual) refuse("residual", last, {kRows + 1, kN}, "the rows of x and the attribute n");
  return made;
}

template <int kOp>
Case added_matmul_case() { return added_case(matmul_case<kOp>(), true, true); }
template <int kOp>
Case added_stack_case() { return added_case(stack_case<kOp>(), true, true); }
Case bias_case() { return added_case(matmul_case<0>(), true, false); }
Case residual_case() { return added_case(stack_case<2>(), false, true); }
Case rotated_added_case() { return added_case(rotated_matmul_case<3>(), true, true); }

template <int kOp>
Case groups_case() {
  constexpr Op op = kOps<kOp>;
  Dictionary given = attributes(op.bits);
  given.insert({{"index", 1}, {"group_sizes", 1}});
  return {{std::string("te_ffi_kernels.") + op.name,
           {normal({5, kK}), buffer_of(weight_of(op.bits), 3), values(kS32, {2, 0, 1}),
            values(kS32, {3, 0, 1})},
           {Tensor(kF32, {5, kN})},
           given},
          [](const Program& p) {
            constexpr int kWeights[] = {2, 2, 2, 1};
            constexpr Op op = kOps<kOp>;
            expect_close(p.results[0], op.name, [&](int64_t i) {
              return i / kN == 4 ? 0.0 : matmul_at(p, weight_of(op.bits, kWeights[i / kN]), i);
            }, op.slack);
          },
          {{operand(3, kS32, {3, 1}), "group_sizes must have 1 axes, got int32[3, 1]"},
           {operand(3, kF32, {3}), "group_sizes must ... got float32[3]"},
           {operand(2, kS32, {2}), "that of group_sizes"},
           {[](Program& p) { p.operands[3].as<int32_t>()[1] = -4; },
            "group_sizes[1] must be at least 0, got -4"},
           {set("n", 41), "the attribute n"},
           {set("group_sizes", 3), "group_sizes must be 0 or 1, got 3"},
           {set("index", 0), "index must be 1 where group_sizes is"},
           // Rows in groups are not rotated, and nothing is done to their results.
           {[](Program& p) {
              p.attributes.insert({"rotation", kBlock});
              p.operands.push_back(filled(kS8, {kK}, 1));
            },
            "must be 0 where rows come in groups"},
           {[](Program& p) {
              p.attributes.insert({"bias", 1});
              p.operands.push_back(filled(kF32, {kN}, 1));
            },
            "must be 0 where rows come in groups"}},
          kOptional};
}

template <int kBits>
Case pack_case() {
  const Weights& w = weight_of(kBits);
  Tensor qvalues(kS8, {kK, kN}), scales(kBits == 4 ? kF16 : kF32, {kK / kGroup, kN});
  for (int64_t i = 0; i < kK * kN; ++i) qvalues.as<int8_t>()[i] = w.qvalue(i / kN, i % kN);
  const std::vector<uint8_t> bytes = w.scale_bytes();
  scales.bytes.assign(bytes.begin(), bytes.end());
  return {{"te_ffi_kernels.pack_w" + std::to_string(kBits),
           {qvalues, scales},
           {Tensor(kU8, buffer_of(w).dims)},
           {{"group", kGroup}, {"scale_kind", kBits == 4 ? 1 : 0}}},
          [](const Program& p) {
            CHECK(p.results[0].bytes == buffer_of(weight_of(kBits)).bytes);
          },
          {{set("group", -8), "got -8"},
           {operand(0, kF32, {kK, kN}), "qvalue must ... got float32"},
           {operand(0, kS8, {kK}), "qvalue must have 2 axes, got int8[64]"},
           {operand(0, kS8, {kK + 1, kN}), "does not divide k = 65"},
           {operand(1, kS8, {2, kN}), "scale must ... got int8"},
           {operand(1, kBits == 4 ? kF16 : kF32, {3, kN}),
            "groups and the columns of quantized values"},
           {result(0, kU8, {1, 1}), "panels and the bytes of one"},
           {result(0, kS8, buffer_of(w).dims), "buffer must ... got int8"}},
          {"scale_kind"}};
}

// float4 with scales in float8_e4m3fn, and one of each column.
const Weights& nvfp4() {
  static std::mt19937 random(11);
  static const Weights made = random_weights(kN, panel_layout(kK, 16, 4, ScaleKind::kE4M3, 1), random);
  return made;
}

Tensor nvfp4_buffer() {
  const Weights& w = nvfp4();
  Tensor made(kU8, {panel_count(kN, 32), w.layout.panel_bytes()});
  made.bytes.assign(w.buffer.get(), w.buffer.get() + w.buffer.size());
  return made;
}

Dictionary nvfp4_attributes() {
  return {{"k", kK}, {"n", kN}, {"group", 16}, {"scale_kind", 3}, {"table", 1}};
}

Case pack_table_case() {
  const Weights& w = nvfp4();
  Tensor qvalues(kS8, {kK, kN}), scales(XLA_FFI_DataType_F8E4M3FN, {kK / 16, kN});
  Tensor columns(kF32, {kN});
  for (int64_t i = 0; i < kK * kN; ++i) qvalues.as<int8_t>()[i] = w.qvalue(i / kN, i % kN);
  for (int64_t i = 0; i < kN; ++i) columns.as<float>()[i] = w.column_scales[static_cast<size_t>(i)];
  const std::vector<uint8_t> bytes = w.scale_bytes();
  scales.bytes.assign(bytes.begin(), bytes.end());
  return {{"te_ffi_kernels.pack_w4",
           {qvalues, scales, columns},
           {nvfp4_buffer()},
           {{"group", 16}, {"scale_kind", 3}, {"table", 1}}},
          [](const Program& p) { CHECK(p.results[0].bytes == nvfp4_buffer().bytes); },
          {{set("table", 2), "got 3 of iq4_nl"},
           {set("table", 9), "table must be from 0 to 3"},
           {set("scale_kind", 4), "got 4 of e2m1"},
           {operand(1, kF32, {kK / 16, kN}), "scale must ... got float32"},
           {operand(2, kF32, {kN + 1}), "that of the columns of quantized values"},
           {operand(2, kF16, {kN}), "column_scale must ... got float16"},
           {operand(0, kS8, {kK}), "qvalue must have 2 axes, got int8[64]"},
           {result(0, kU8, {1, 1}), "panels and the bytes of one"}},
          {"scale_kind", "table"}};
}

Case matmul_table_case() {
  return {{"te_ffi_kernels.gemm_w4a16",
           {normal({kRows, kK}), nvfp4_buffer()},
           {Tensor(kF32, {kRows, kN})},
           nvfp4_attributes()},
          [](const Program& p) {
            expect_close(
                p.results[0], "y",
                [&](int64_t i) {
                  double sum = 0;
                  for (int64_t k = 0; k < kK; ++k) {
                    sum += number(p.operands[0], i / kN * kK + k) * nvfp4().number(k, i % kN) *
                           static_cast<double>(nvfp4().scale(k, i % kN));
                  }
                  return sum;
                },
                1e-3);
          },
          {{set("table", 0), "got 3 of int4"},
           {set("scale_kind", 2), "are a buffer of"},
           {operand(1, kU8, {3}), "axes"}},
          {"rotation", "scale_kind", "table"}};
}

template <int kBits>
Case take_case() {
  Dictionary given = attributes(kBits);
  given.insert({{"bits", kBits}, {"axis", kBits == 4 ? 1 : 0}});
  const int64_t width = kBits == 4 ? kK : kN;
  return {{"te_ffi_kernels.packed_take",
           {buffer_of(weight_of(kBits)), values(kS32, {5, -1, 0, 99})},
           {Tensor(kF32, {4, width})},
           given},
          [](const Program& p) {
            const int64_t width = p.results[0].dims[1], last = (kBits == 4 ? kN : kK) - 1;
            const int64_t taken[] = {5, last, 0, last};
            expect_close(p.results[0], "taken", [&](int64_t i) {
              const int64_t at = taken[i / width], other = i % width;
              const Weights& w = weight_of(kBits);
              return kBits == 4 ? weight_at(w, other, at) : weight_at(w, at, other);
            });
          },
          {{set("bits", 5), "bits must be 4 or 8, got 5"},
           {operand(0, kU8, {3}), "buffer must have 2 axes, got uint8[3]"},
           {operand(0, kF32, {1, 1}), "buffer must ... got float32"},
           {operand(1, kS32, {2, 2}), "indices must ... got int32[2, 2]"},
           {operand(1, kF32, {4}), "indices must ... got float32"},
           {result(0, kS8, {4, width}), "taken must ... got int8"},
           {result(0, kF32, {4, 3}), "the indices and the other axis of the weight"}},
          kOptional};
}

const Registered kRegistered[] = {
    Registered(matmul_case<0>),         Registered(matmul_case<1>),
    Registered(matmul_case<2>),         Registered(matmul_case<3>),
    Registered(stack_case<0>),          Registered(stack_case<1>),
    Registered(stack_case<2>),          Registered(stack_case<3>),
    Registered(groups_case<0>),         Registered(groups_case<1>),
    Registered(groups_case<2>),         Registered(groups_case<3>),
    Registered(rotated_matmul_case<0>), Registered(rotated_matmul_case<3>),
    Registered(rotated_stack_case<0>),  Registered(rotated_stack_case<2>),
    Registered(added_matmul_case<0>),   Registered(added_matmul_case<1>),
    Registered(added_matmul_case<2>),   Registered(added_matmul_case<3>),
    Registered(added_stack_case<0>),    Registered(added_stack_case<1>),
    Registered(added_stack_case<2>),    Registered(added_stack_case<3>),
    Registered(bias_case),              Registered(residual_case),
    Registered(rotated_added_case),     Registered(pack_case<8>),
    Registered(pack_case<4>),           Registered(pack_table_case),
    Registered(matmul_table_case),      Registered(take_case<8>),
    Registered(take_case<4>)};

}  // namespace
