// Convolutions on buffers of exactly their size, at odd addresses, at edge sizes, against plain
// loops over integers, bit for bit on all instruction sets.
#include "convolution/convolution.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/parallel.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using convolution::Args;
using convolution::Axis;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};

struct Case {
  int64_t images, channels, n, groups;
  int bits;
  Axis axes[3];
  DType x_dtype = DType::F32, y_dtype = DType::F32;
  bool bias = false, residual = false, clamps = false, scaled = false;
  bool to_int8 = false;  // y, of results that are y_dtype

  int64_t product(int64_t Axis::*size) const {
    return axes[0].*size * axes[1].*size * axes[2].*size;
  }
  int64_t x_size() const { return images * product(&Axis::size) * channels; }
  int64_t y_size() const { return images * product(&Axis::out) * n; }
  int64_t k() const { return product(&Axis::window) * channels / groups; }

  std::string text() const {
    std::string all = std::to_string(images) + " images of " + std::to_string(channels) + " to " +
                      std::to_string(n) + ", groups=" + std::to_string(groups) +
                      " bits=" + std::to_string(bits) + " x=" + name(x_dtype) +
                      " y=" + name(y_dtype);
    for (const Axis& a : axes) {
      all += " (" + std::to_string(a.size) + "->" + std::to_string(a.out) + " window " +
             std::to_string(a.window) + " stride " + std::to_string(a.stride) + " dilation " +
             std::to_string(a.dilation) + " low " + std::to_string(a.low) + ")";
    }
    return all + (bias ? " bias" : "") + (residual ? " residual" : "") +
           (clamps ? " clamps" : "") + (scaled ? " scaled" : "") + (to_int8 ? " to int8" : "");
  }
};

// As many windows as fit with `low` and `high` zeros around.
Axis axis(int64_t size, int64_t window = 1, int64_t stride = 1, int64_t dilation = 1,
          int64_t low = 0, int64_t high = 0) {
  Axis made;
  made.size = size;
  made.window = window;
  made.stride = stride;
  made.dilation = dilation;
  made.low = low;
  made.out = std::max<int64_t>(
      0, (size + low + high - (window - 1) * dilation - 1 + stride) / stride);
  return made;
}

Axis same(int64_t size, int64_t window, int64_t stride = 1) {
  const int64_t pad = std::max<int64_t>(0, ((size - 1) / stride) * stride + window - size);
  return axis(size, window, stride, 1, pad / 2, pad - pad / 2);
}

Buffer numbers(int64_t count, DType type, std::mt19937& random, int64_t offset) {
  const int64_t size = static_cast<int64_t>(byte_size(type));
  Buffer made(count * size, offset);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  for (int64_t i = 0; i < count; ++i) {
    if (type == DType::S8) {
      made.get()[i] = static_cast<uint8_t>(random());
    } else {
      set_element(made.get(), type, i, normal(random));
    }
  }
  return made;
}

float rounded(float value, DType type) {
  uint8_t bytes[4];
  set_element(bytes, type, 0, value);
  return static_cast<float>(element(bytes, type, 0));
}

struct Operands {
  Weights w;
  Buffer x, bias, residual;
  float scale = 0.02f, y_scale = 0.043f;
};

Args args_of(const Case& c, const Operands& o, Buffer* y) {
  Args args;
  args.x = o.x.get();
  args.x_dtype = c.x_dtype;
  args.images = c.images;
  args.channels = c.channels;
  args.groups = c.groups;
  std::copy(c.axes, c.axes + 3, args.axes);
  args.weights = o.w.packed();
  args.y = y->get();
  args.y_dtype = c.y_dtype;
  if (c.bias) args.bias = o.bias.get();
  if (c.residual) args.residual = o.residual.get();
  if (c.scaled) args.x_scale = &o.scale;
  if (c.to_int8) args.y_scale = &o.y_scale;
  args.clamps = c.clamps;
  args.least = 0.0f;
  args.most = 6.0f;
  return args;
}

// The nearest quantized value of a number.
int quantized_value(float x, float scale) {
  scale = scale < 0x1p-126f ? 0x1p-126f : scale;
  const float ratio = x / (scale > 0x1p126f ? 0x1p126f : scale);
  if (std::isnan(ratio)) return 0;
  return static_cast<int>(std::nearbyint(std::max(-127.0f, std::min(127.0f, ratio))));
}

// Quantized numbers of an image, and their scale.
std::vector<int> quantized(const Case& c, const Operands& o, int64_t image, float* scale) {
  const int64_t size = c.x_size() / c.images;
  if (c.x_dtype == DType::S8) {
    *scale = o.scale;
    const auto* x = reinterpret_cast<const int8_t*>(o.x.get()) + image * size;
    return {x, x + size};
  }
  float most = 0;
  bool is_nan = false;
  for (int64_t i = 0; i < size; ++i) {
    const auto x = static_cast<float>(element(o.x.get(), c.x_dtype, image * size + i));
    is_nan = is_nan || std::isnan(x);
    most = std::max(most, std::fabs(x));
  }
  *scale = c.scaled ? o.scale : is_nan ? std::numeric_limits<float>::quiet_NaN()
                                       : most * (1.0f / 127.0f);
  *scale = *scale < 0x1p-126f ? 0x1p-126f : *scale;
  std::vector<int> found(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    const auto x = static_cast<float>(element(o.x.get(), c.x_dtype, image * size + i));
    found[static_cast<size_t>(i)] = quantized_value(x, *scale);
  }
  return found;
}

// The sum of products of a place and an output channel.
int64_t sum_of(const Case& c, const Operands& o, const std::vector<int>& x, const int64_t* at,
               int64_t n) {
  const int64_t of_group = c.channels / c.groups, group = n / (c.n / c.groups);
  int64_t sum = 0, row = 0;
  const Axis &d = c.axes[0], &h = c.axes[1], &w = c.axes[2];
  for (int64_t i = 0; i < d.window; ++i) {
    for (int64_t j = 0; j < h.window; ++j) {
      for (int64_t l = 0; l < w.window; ++l, row += of_group) {
        const int64_t z = at[0] * d.stride + i * d.dilation - d.low;
        const int64_t y = at[1] * h.stride + j * h.dilation - h.low;
        const int64_t p = at[2] * w.stride + l * w.dilation - w.low;
        if (z < 0 || z >= d.size || y < 0 || y >= h.size || p < 0 || p >= w.size) continue;
        const int64_t pixel = ((z * h.size + y) * w.size + p) * c.channels + group * of_group;
        for (int64_t k = 0; k < of_group; ++k) {
          sum += x[static_cast<size_t>(pixel + k)] * o.w.qvalue(row + k, n);
        }
      }
    }
  }
  return sum;
}

std::vector<float> expected(const Case& c, const Operands& o) {
  std::vector<float> y(static_cast<size_t>(c.y_size()));
  size_t i = 0;
  for (int64_t image = 0; image < c.images; ++image) {
    float scale;
    const std::vector<int> x = quantized(c, o, image, &scale);
    int64_t at[3];
    for (at[0] = 0; at[0] < c.axes[0].out; ++at[0]) {
      for (at[1] = 0; at[1] < c.axes[1].out; ++at[1]) {
        for (at[2] = 0; at[2] < c.axes[2].out; ++at[2]) {
          for (int64_t n = 0; n < c.n; ++n, ++i) {
            const auto sum = static_cast<float>(sum_of(c, o, x, at, n));
            float value = rounded(sum * scale * o.w.scale(0, n), c.y_dtype);
            const auto add = [&](const Buffer& from, int64_t index) {
              value = rounded(
                  value + static_cast<float>(element(from.get(), c.y_dtype, index)), c.y_dtype);
            };
            if (c.bias) add(o.bias, n);
            if (c.residual) add(o.residual, static_cast<int64_t>(i));
            if (c.clamps) {
              value = value < 0.0f ? 0.0f : value;
              value = value > 6.0f ? 6.0f : value;
            }
            y[i] = c.to_int8 ? static_cast<float>(quantized_value(value, o.y_scale)) : value;
          }
        }
      }
    }
  }
  return y;
}

void check_operands(const Case& c, const Operands& o, const Parallel& parallel, int64_t offset) {
  const std::vector<float> wanted = expected(c, o);
  const int64_t size = c.to_int8 ? 1 : static_cast<int64_t>(byte_size(c.y_dtype));
  for (Isa isa : tested_isas()) {
    Buffer y(c.y_size() * size, offset);
    convolution::convolve(args_of(c, o, &y), parallel, isa);
    bool good = true;
    for (int64_t i = 0; i < c.y_size() && good; ++i) {
      const auto got = c.to_int8 ? static_cast<float>(static_cast<int8_t>(y.get()[i]))
                                 : static_cast<float>(element(y.get(), c.y_dtype, i));
      const float want = wanted[static_cast<size_t>(i)];
      good = (std::isnan(got) && std::isnan(want)) || got == want;
    }
    CHECK_THAT(good, c.text() + " on " + name(isa));
  }
}

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel, int64_t offset) {
  if (!takes_case()) return;
  const int64_t addend = static_cast<int64_t>(byte_size(c.y_dtype)) * (offset % 3);
  Operands o{random_weights(c.k(), c.n, 0, c.bits, random, offset),
             numbers(c.x_size(), c.x_dtype, random, offset),
             numbers(c.n, c.y_dtype, random, addend),
             numbers(c.y_size(), c.y_dtype, random, addend)};
  check_operands(c, o, parallel, offset);
}

// Dtypes, and what is added, take turns.
Case with_turn(Case c, int turn) {
  c.x_dtype = kFloats[turn % 3];
  c.y_dtype = kFloats[turn / 3 % 3];
  c.bias = turn % 2 == 1;
  c.residual = turn / 2 % 2 == 1;
  c.clamps = turn / 4 % 2 == 1;
  c.scaled = turn % 5 == 4;
  c.to_int8 = turn % 7 == 3;
  if (turn % 5 == 4 && turn % 2 == 0) c.x_dtype = DType::S8;
  return c;
}

TEST(convolutions_of_all_windows) {
  std::mt19937 random(41);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  const Axis one = axis(1);
  const std::vector<std::vector<Axis>> windows = {
      {one, same(9, 3), same(7, 3)},           {one, same(9, 3, 2), same(8, 3, 2)},
      {one, axis(9, 3), axis(11, 5, 1, 1, 2, 2)}, {one, axis(9, 2, 1, 3), axis(9, 3, 1, 2, 1, 2)},
      {one, axis(6, 3, 3, 1, -1, 2), axis(9, 2, 1, 1, 3, -2)},
      {one, one, same(13, 3)},                 {one, axis(5), axis(6)},
      {same(3, 2), same(4, 3), same(5, 3, 2)}, {axis(4, 2, 2, 2, 1, 1), axis(3), axis(7, 7)},
      {one, axis(3, 3, 1, 1, 4, 4), axis(2, 3, 5, 1, 4, 4)},  // windows of zeros alone
      {one, axis(1, 1, 2), axis(40, 1, 3)},
  };
  for (const std::vector<Axis>& axes : windows) {
    for (int64_t channels : {1, 3, 4, 8, 20, 67}) {
      for (int bits : {8, 4}) {
        const int64_t n = std::vector<int64_t>{5, 16, 50, 64, 97}[static_cast<size_t>(turn % 5)];
        Case c{turn % 4 == 3 ? 5 : 1 + turn % 2, channels, n, 1, bits, {axes[0], axes[1], axes[2]}};
        check_case(with_turn(c, turn), random, parallel, turn % 4);
        ++turn;
      }
    }
  }
}

TEST(convolutions_of_groups) {
  std::mt19937 random(42);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (const Axis& h : {same(7, 3), axis(9, 2, 2, 3, 1, 1), axis(4)}) {
    for (const Axis& w : {same(10, 3), same(9, 5, 2), axis(17, 2, 1, 2, 1, 1)}) {
      for (int64_t channels : {2, 15, 16, 33, 50}) {  // depthwise
        Case c{1 + turn % 3, channels, channels, channels, turn % 4 == 1 ? 4 : 8,
               {turn % 6 == 5 ? same(3, 2) : axis(1), h, w}};
        check_case(with_turn(c, turn), random, parallel, turn % 4);
        ++turn;
      }
      for (int64_t of_group : {1, 3, 8}) {  // of whole panels
        Case c{1, 3 * of_group, 96, 3, turn % 2 == 0 ? 8 : 4, {axis(1), h, w}};
        check_case(with_turn(c, turn), random, parallel, turn % 4);
        ++turn;
      }
    }
  }
}

// Many images for threads that each take some; and rows enough for many tasks of one.
TEST(convolutions_of_many_tasks) {
  std::mt19937 random(43);
  Threads pool(3);
  const Parallel parallel(pool);
  check_case({9, 16, 40, 1, 8, {axis(1), same(10, 3), same(11, 3)}}, random, parallel, 1);
  check_case({7, 24, 24, 24, 8, {axis(1), same(20, 3), same(20, 3)}}, random, parallel, 2);
  check_case({1, 32, 130, 1, 8, {axis(1), same(40, 3), same(33, 3)}}, random, parallel, 3);
  check_case({1, 8, 300, 1, 4, {axis(1), same(3, 3), same(70, 3)}}, random, parallel, 0);
}

// int8 in and out: 1x1 windows, which are read where they lie or are copied, many pixels and few,
// padded lines, and depthwise ones.
TEST(convolutions_of_int8_to_int8) {
  std::mt19937 random(47);
  Threads pool(3);
  const Parallel parallel(pool);
  int turn = 0;
  for (const auto& [size, line] : {std::pair{1, 1}, {7, 7}, {13, 10}, {1, 140}, {12, 16}}) {
    for (int64_t channels : {4, 6, 20, 36}) {
      for (int64_t images : {1, 9}) {
        Case c{images, channels, std::vector<int64_t>{5, 64, 37}[static_cast<size_t>(turn % 3)], 1,
               turn % 4 == 3 ? 4 : 8, {axis(1), axis(size), axis(line)}};
        c = with_turn(c, turn);
        c.scaled = true;
        c.x_dtype = turn % 8 == 5 ? DType::F32 : DType::S8;
        c.to_int8 = turn % 3 != 1;
        check_case(c, random, parallel, turn % 4);
        c.groups = c.n = c.channels;
        c.axes[1] = same(size, 3);
        c.axes[2] = same(line, 5, 2);
        check_case(c, random, parallel, turn % 4);
        c.groups = 1;
        check_case(c, random, parallel, turn % 4);
        ++turn;
      }
    }
  }
}

// Quotients that lie between two whole numbers, where a product with the reciprocal is not enough.
TEST(convolutions_round_results_as_quotients) {
  std::mt19937 random(48);
  for (bool depthwise : {false, true}) {
    Case c{1, 16, 16, depthwise ? 16 : 1, 8, {axis(1), axis(9), axis(11)}};
    c.scaled = c.residual = c.to_int8 = true;
    Operands o{random_weights(c.k(), c.n, 0, c.bits, random), numbers(c.x_size(), c.x_dtype, random, 0),
               Buffer(0, 0), Buffer(c.y_size() * 4, 1)};
    o.scale = 0.0f;  // products that are next to nothing: results are the residual
    for (int64_t i = 0; i < c.y_size(); ++i) {
      const float half = (static_cast<float>(i % 255) - 127.5f) * o.y_scale;
      const float beyond[] = {NAN, INFINITY, -INFINITY, 1e30f, 0.0f};
      set_element(o.residual.get(), DType::F32, i, i % 13 == 5 ? beyond[i % 5] : half);
    }
    check_operands(c, o, Parallel(), 1);
  }
}

// Results that go to int8 in one step, from sums and a bias alone: close to the middle between two
// whole numbers, on it, beyond what is int8, and with scales whose products are no normal numbers.
TEST(convolutions_round_results_in_one_step) {
  std::mt19937 random(49);
  const float scales[][2] = {{0.02f, 0.043f}, {0.25f, 1.0f},      {0.02f, 7e-4f},  {1e-20f, 1e-22f},
                             {1e-30f, 1e-38f}, {1e30f, 1e30f},    {1e20f, 3e19f},  {2e-38f, 1.0f},
                             {0.02f, 1e-36f},  {INFINITY, 0.01f}, {NAN, 0.01f},    {0.02f, INFINITY}};
  int turn = 0;
  for (const auto& [scale, y_scale] : scales) {
    for (bool depthwise : {false, true}) {
      const int64_t n = depthwise ? 36 : 100;
      Case c{1, 36, n, depthwise ? 36 : 1, turn % 4 == 2 ? 4 : 8, {axis(1), same(17, 1), same(19, 1)}};
      if (turn % 3 == 1) c.axes[1] = c.axes[2] = same(13, 3);
      c.x_dtype = DType::S8;
      c.scaled = c.bias = c.to_int8 = true;
      c.clamps = turn++ % 2 == 1;
      Operands o{random_weights(c.k(), c.n, 0, c.bits, random),
                 numbers(c.x_size(), c.x_dtype, random, 0), Buffer(c.n * 4, 1), Buffer(0, 0)};
      o.scale = scale;
      o.y_scale = y_scale;
      for (int64_t i = 0; i < c.n; ++i) {
        const float half = (static_cast<float>(i % 255) - 50.5f) * y_scale;
        const float beyond[] = {NAN, INFINITY, -INFINITY, 1e30f, 1e-40f};
        set_element(o.bias.get(), DType::F32, i, i % 9 == 5 ? beyond[i % 5] : i % 9 == 7 ? 0 : half);
      }
      check_operands(c, o, Parallel(), 1);
    }
  }
}

// Products of -128 and -128, the largest: two of them are beyond int16.
TEST(convolutions_of_the_least_numbers) {
  std::mt19937 random(49);
  for (int64_t groups : {1, 24}) {
    Case c{1, 24, 24, groups, 8, {axis(1), same(5, 3), same(6, 3)}};
    c.x_dtype = DType::S8;
    c.scaled = true;
    Operands o{random_weights(c.k(), c.n, 0, c.bits, random, 0, -128),
               Buffer(c.x_size(), 1), Buffer(0, 0), Buffer(0, 0)};
    std::memset(o.x.get(), 0x80, static_cast<size_t>(c.x_size()));
    check_operands(c, o, Parallel(), 1);
  }
}

TEST(convolutions_of_what_is_not_finite) {
  std::mt19937 random(44);
  for (DType type : kFloats) {
    for (bool depthwise : {false, true}) {
      for (bool scaled : {false, true}) {
        Case c{3, 16, 16, depthwise ? 16 : 1, 8, {axis(1), same(5, 3), same(6, 3)}};
        c.x_dtype = c.y_dtype = type;
        c.scaled = scaled;
        c.clamps = !scaled;
        Operands o{random_weights(c.k(), c.n, 0, c.bits, random),
                   numbers(c.x_size(), type, random, 1), Buffer(0, 0), Buffer(0, 0)};
        const int64_t size = c.x_size() / c.images;
        const float given[] = {NAN, INFINITY, -INFINITY};
        for (int64_t i = 0; i < 3; ++i) {  // in the first image, then in the second
          set_element(o.x.get(), type, i / 2 * size + 7 * i, given[i]);
        }
        check_operands(c, o, Parallel(), 1);
        for (int64_t i = 0; i < c.x_size(); ++i) set_element(o.x.get(), type, i, 0.0f);
        check_operands(c, o, Parallel(), 0);
      }
    }
  }
}

TEST(convolutions_of_nothing) {
  std::mt19937 random(45);
  for (const Case& c : {Case{0, 4, 8, 1, 8, {axis(1), same(5, 3), same(5, 3)}},
                        Case{2, 4, 8, 1, 8, {axis(1), axis(2, 3), same(5, 3)}},
                        Case{2, 4, 8, 1, 8, {axis(1), axis(0, 3, 1, 1, 2, 2), same(5, 3)}}}) {
    check_case(c, random, Parallel(), 1);
  }
}

TEST(convolutions_refuse_what_can_not_be) {
  std::mt19937 random(46);
  const Case c{2, 4, 8, 1, 8, {axis(1), same(5, 3), same(5, 3)}};
  Operands o{random_weights(c.k(), c.n, 0, c.bits, random), numbers(c.x_size(), c.x_dtype, random, 0),
             Buffer(0, 0), Buffer(0, 0)};
  Buffer y(c.y_size() * 4, 0);
  const auto refused = [&](const std::string& why, const std::function<void(Args&)>& change) {
    Args args = args_of(c, o, &y);
    change(args);
    CHECK_THAT(throws<Error>([&] { convolution::convolve(args, Parallel(), Isa::kGeneric); }, why),
               why);
  };
  refused("x must be float32", [](Args& a) { a.x_dtype = DType::S8; });
  refused("y must be float32", [](Args& a) { a.y_dtype = DType::F64; });
  refused("groups must divide", [](Args& a) { a.groups = 3; });
  refused("strides and dilations at least 1", [](Args& a) { a.axes[1].stride = 0; });
  refused("must have 48 rows", [](Args& a) { a.axes[0].window = 2, a.axes[1].window = 2; });
  refused("of whole panels", [](Args& a) {
    a.groups = 2;
    a.channels = 8;
  });
  Weights damaged = random_weights(c.k(), c.n, 0, c.bits, random);
  damaged.buffer.get()[200] ^= 1;
  refused("corrupted quantized values", [&](Args& a) { a.weights = damaged.packed(); });
  const Weights grouped = random_weights(32, 8, 8, 8, random);
  refused("without groups", [&](Args& a) {
    a.weights = grouped.packed();
    a.axes[1].window = 2, a.axes[2].window = 4;
  });
}

}  // namespace
