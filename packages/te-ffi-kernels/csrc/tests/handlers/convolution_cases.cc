// Calls of convolutions with packed weights.
#include "tests/handlers/cases.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

// Two images of 4 x 5 pixels with 3 channels, windows of 2 x 3.
constexpr int64_t kImages = 2, kHeight = 4, kWidth = 5, kChannels = 3, kK = 18, kN = 20;

const Weights& weight_of(int bits) {
  static const auto* all = [] {
    std::mt19937 random(10);
    auto* made = new std::vector<Weights>;
    for (int each : {8, 4}) made->push_back(random_weights(kK, kN, 0, each, random));
    return made;
  }();
  return (*all)[bits == 8 ? 0 : 1];
}

Tensor buffer_of(const Weights& w) {
  Tensor made(kU8, {panel_count(kN, w.layout.columns()), w.layout.panel_bytes()});
  made.bytes.assign(w.buffer.get(), w.buffer.get() + w.buffer.size());
  return made;
}

Dictionary attributes() {
  Dictionary made{{"k", kK},          {"n", kN},          {"group", int64_t{0}},
                  {"groups", int64_t{1}}, {"bias", int64_t{1}}, {"residual", int64_t{1}},
                  {"clamps", int64_t{1}}, {"least", -1.0},    {"most", 1.0},
                  {"x_scale", int64_t{1}}};
  const int64_t windows[] = {1, 2, 3}, lows[] = {0, 1, 0};
  for (int i = 0; i < 3; ++i) {
    const std::string at = "_" + std::to_string(i);
    made.insert({"window" + at, windows[i]});
    made.insert({"stride" + at, int64_t{1}});
    made.insert({"dilation" + at, int64_t{1}});
    made.insert({"low" + at, lows[i]});
  }
  return made;
}

// The result at index i, with numbers of x that are whole steps of its scale.
double convolution_at(const Program& p, const Weights& w, int64_t i) {
  const int64_t n = i % kN, x = i / kN % (kWidth - 2), y = i / kN / (kWidth - 2) % kHeight;
  const int64_t image = i / kN / (kWidth - 2) / kHeight;
  double sum = 0;
  for (int64_t k = 0; k < kK; ++k) {
    const int64_t row = y + k / 9 - 1, pixel = x + k / 3 % 3;
    if (row < 0) continue;
    const int64_t at = ((image * kHeight + row) * kWidth + pixel) * kChannels + k % 3;
    sum += number(p.operands[0], at) * w.qvalue(k, n) * static_cast<double>(w.scale(k, n));
  }
  sum += number(p.operands[3], n) + number(p.operands[4], i);
  return std::fmin(1.0, std::fmax(-1.0, sum));
}

template <int kBits>
Case convolution(const char* target) {
  const std::vector<int64_t> y = {kImages, kHeight, kWidth - 2, kN};
  Tensor x(kF32, {kImages, kHeight, kWidth, kChannels});
  for (int64_t i = 0; i < x.size(); ++i) set_number(x, i, 0.5 * static_cast<double>(i * 37 % 9 - 4));
  const Weights& w = weight_of(kBits);
  return {{target,
           {x, buffer_of(w), filled(kF32, {}, 0.5), filled(kF32, {kN}, 0.25), normal(y)},
           {Tensor(kF32, y)},
           attributes()},
          [&w](const Program& p) {
            expect_close(p.results[0], "y", [&](int64_t i) { return convolution_at(p, w, i); });
          },
          {{operand(0, kF32, {kImages, kChannels}), "x must have 3 to 5 axes"},
           {operand(0, kS32, {kImages, kHeight, kWidth, kChannels}), "x must be of: float32"},
           {result(0, kS8, y), "y must be of: float32"},
           {operand(1, kU8, {2, 64}), "packed weight: k = 18"},
           {operand(2, kF32, {1}), "x_scale must have the shape []"},
           {operand(3, kF32, {kN + 1}), "bias must have the shape [20]"},
           {operand(3, kF16, {kN}), "bias must be of: float32"},
           {operand(4, kF32, {kImages, kHeight, kWidth, kN}), "residual must have the shape of y"},
           {result(0, kF32, {kImages, kHeight, kWidth - 2, kN + 1}), "y must have the images of x"},
           {result(0, kF32, {kImages, kHeight, kN}), "y must have 4 axes"},
           {set("window_1", int64_t{0}), "window_1 must be from 1"},
           {set("stride_2", int64_t{-1}), "stride_2 must be from 1"},
           {set("groups", int64_t{2}), "groups must divide"},
           {set("clamps", int64_t{2}), "clamps must be 0 or 1"},
           {set("k", int64_t{17}), "got k = 17"}},
          {"scale_kind", "rotation", "x_scale"}};
}

CASE(convolution_of_int8) { return convolution<8>("te_ffi_kernels.conv_w8a8"); }
// int8 to int8, by a scale that is twice that of x.
CASE(convolution_to_int8) {
  const std::vector<int64_t> shape = {kImages, kHeight, kWidth - 2, kN};
  Case floats = convolution<8>("te_ffi_kernels.conv_w8a8");
  Program& p = floats.program;
  Tensor x(kS8, {kImages, kHeight, kWidth, kChannels});
  for (int64_t i = 0; i < x.size(); ++i) set_number(x, i, static_cast<double>(i * 37 % 9 - 4));
  p.operands[0] = x;
  p.operands.insert(p.operands.begin() + 3, filled(kF32, {}, 1.0 / 64));
  p.results = {Tensor(kS8, shape)};
  p.attributes.insert({"int8_of", int64_t{1}});
  const Weights& w = weight_of(8);
  return {p,
          [&w](const Program& p) {
            Program floats = p;  // as the function above has it
            floats.operands.erase(floats.operands.begin() + 3);
            Tensor x(kF32, {kImages, kHeight, kWidth, kChannels});
            for (int64_t i = 0; i < x.size(); ++i) set_number(x, i, 0.5 * number(p.operands[0], i));
            floats.operands[0] = x;
            expect_close(p.results[0], "y", [&](int64_t i) {
              return std::nearbyint(64 * convolution_at(floats, w, i));
            });
          },
          {{operand(3, kF32, {1}), "y_scale must have the shape []"},
           {set("int8_of", int64_t{4}), "int8_of must be 0, or 1, 2 or 3"},
           {result(0, kF32, shape), "y must be of: int8"}},
          {"scale_kind", "rotation", "x_scale", "int8_of"}};
}

CASE(convolution_of_int4) { return convolution<4>("te_ffi_kernels.conv_w4a8"); }

// Depthwise, of floats: the same images and windows with as many channels as results.
template <int kBits>
Case depthwise(const char* target) {
  constexpr int64_t kTaps = 6;
  static const auto* w = [] {
    std::mt19937 random(11);
    return new Weights(random_weights(kTaps, kN, 0, kBits, random));
  }();
  const std::vector<int64_t> y = {kImages, kHeight, kWidth - 2, kN};
  Dictionary given = attributes();
  given.erase("x_scale");
  given.at("k") = kTaps;
  given.at("groups") = kN;
  return {{target,
           {normal({kImages, kHeight, kWidth, kN}), buffer_of(*w), filled(kF32, {kN}, 0.25),
            normal(y)},
           {Tensor(kF32, y)},
           given},
          [](const Program& p) {
            expect_close(p.results[0], "y", [&](int64_t i) {
              const int64_t n = i % kN, x = i / kN % (kWidth - 2), row = i / kN / (kWidth - 2);
              double sum = 0;
              for (int64_t k = 0; k < kTaps; ++k) {
                if (row % kHeight + k / 3 < 1) continue;
                const int64_t at = ((row + k / 3 - 1) * kWidth + x + k % 3) * kN + n;
                sum += number(p.operands[0], at) * w->qvalue(k, n) *
                       static_cast<double>(w->scale(0, n));
              }
              sum += number(p.operands[2], n) + number(p.operands[3], i);
              return std::fmin(1.0, std::fmax(-1.0, sum));
            });
          },
          {{operand(0, kS8, {kImages, kHeight, kWidth, kN}), "x and y must be float32"},
           {operand(2, kF32, {kN + 1}), "bias must have the shape [20]"},
           {set("groups", int64_t{1}), "as many groups"},
           {set("k", int64_t{5}), "got k = 5"}},
          {"scale_kind", "rotation", "x_scale"}};
}

CASE(depthwise_of_int8) { return depthwise<8>("te_ffi_kernels.conv_w8a16"); }
CASE(depthwise_of_int4) { return depthwise<4>("te_ffi_kernels.conv_w4a16"); }

}  // namespace
