// Depthwise convolutions of floats on buffers of exactly their size, at odd addresses, at edge sizes,
// against plain loops of multiply-adds, bit for bit on all instruction sets.
#include "depthwise/depthwise.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/parallel.h"
#include "depthwise/table.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using convolution::Args;
using convolution::Axis;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};

struct Case {
  int64_t images, channels;
  int bits;
  Axis axes[3];
  DType x_dtype = DType::F32, y_dtype = DType::F32;
  bool bias = false, residual = false, clamps = false;

  int64_t product(int64_t Axis::*size) const {
    return axes[0].*size * axes[1].*size * axes[2].*size;
  }
  int64_t x_size() const { return images * product(&Axis::size) * channels; }
  int64_t y_size() const { return images * product(&Axis::out) * channels; }

  std::string text() const {
    std::string all = std::to_string(images) + " images of " + std::to_string(channels) +
                      " bits=" + std::to_string(bits) + " x=" + name(x_dtype) +
                      " y=" + name(y_dtype);
    for (const Axis& a : axes) {
      all += " (" + std::to_string(a.size) + "->" + std::to_string(a.out) + " window " +
             std::to_string(a.window) + " stride " + std::to_string(a.stride) + " dilation " +
             std::to_string(a.dilation) + " low " + std::to_string(a.low) + ")";
    }
    return all + (bias ? " bias" : "") + (residual ? " residual" : "") + (clamps ? " clamps" : "");
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

Buffer normals(int64_t count, DType type, std::mt19937& random, int64_t offset) {
  Buffer made(count * static_cast<int64_t>(byte_size(type)), offset);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  for (int64_t i = 0; i < count; ++i) set_element(made.get(), type, i, normal(random));
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
};

Operands operands_of(const Case& c, std::mt19937& random, int64_t offset) {
  const int64_t addend = static_cast<int64_t>(byte_size(c.y_dtype)) * (offset % 3);
  return {random_weights(c.product(&Axis::window), c.channels, 0, c.bits, random, offset),
          normals(c.x_size(), c.x_dtype, random, offset),
          normals(c.channels, c.y_dtype, random, addend),
          normals(c.y_size(), c.y_dtype, random, addend)};
}

Args args_of(const Case& c, const Operands& o, Buffer* y) {
  Args args;
  args.x = o.x.get();
  args.x_dtype = c.x_dtype;
  args.images = c.images;
  args.channels = args.groups = c.channels;
  std::copy(c.axes, c.axes + 3, args.axes);
  args.weights = o.w.packed();
  args.y = y->get();
  args.y_dtype = c.y_dtype;
  if (c.bias) args.bias = o.bias.get();
  if (c.residual) args.residual = o.residual.get();
  args.clamps = c.clamps;
  args.least = -1.0f;
  args.most = 6.0f;
  return args;
}

float sum_of(const Case& c, const Operands& o, int64_t image, const int64_t* at, int64_t n) {
  const Axis &d = c.axes[0], &h = c.axes[1], &w = c.axes[2];
  float sum = 0;
  int64_t row = 0;
  for (int64_t i = 0; i < d.window; ++i) {
    for (int64_t j = 0; j < h.window; ++j) {
      for (int64_t l = 0; l < w.window; ++l, ++row) {
        const int64_t z = at[0] * d.stride + i * d.dilation - d.low;
        const int64_t y = at[1] * h.stride + j * h.dilation - h.low;
        const int64_t p = at[2] * w.stride + l * w.dilation - w.low;
        if (z < 0 || z >= d.size || y < 0 || y >= h.size || p < 0 || p >= w.size) continue;
        const int64_t pixel = ((image * d.size + z) * h.size + y) * w.size + p;
        const auto x = static_cast<float>(element(o.x.get(), c.x_dtype, pixel * c.channels + n));
        sum = std::fmaf(x, static_cast<float>(o.w.qvalue(row, n)), sum);
      }
    }
  }
  return sum;
}

void check_operands(const Case& c, const Operands& o, const Parallel& parallel, int64_t offset) {
  std::vector<float> wanted;
  int64_t at[3];
  for (int64_t image = 0; image < c.images; ++image) {
    for (at[0] = 0; at[0] < c.axes[0].out; ++at[0]) {
      for (at[1] = 0; at[1] < c.axes[1].out; ++at[1]) {
        for (at[2] = 0; at[2] < c.axes[2].out; ++at[2]) {
          for (int64_t n = 0; n < c.channels; ++n) {
            float value = sum_of(c, o, image, at, n) * o.w.scale(0, n);
            value = rounded(value, c.y_dtype);
            const auto add = [&](const Buffer& from, int64_t index) {
              value = rounded(
                  value + static_cast<float>(element(from.get(), c.y_dtype, index)), c.y_dtype);
            };
            if (c.bias) add(o.bias, n);
            if (c.residual) add(o.residual, static_cast<int64_t>(wanted.size()));
            if (c.clamps) value = value < -1.0f ? -1.0f : value > 6.0f ? 6.0f : value;
            wanted.push_back(value);
          }
        }
      }
    }
  }
  for (Isa isa : available_isas()) {
    Buffer y(c.y_size() * static_cast<int64_t>(byte_size(c.y_dtype)), offset);
    depthwise::convolve(args_of(c, o, &y), parallel, isa);
    bool good = true;
    for (size_t i = 0; i < wanted.size() && good; ++i) {
      const auto got = static_cast<float>(element(y.get(), c.y_dtype, static_cast<int64_t>(i)));
      good = (std::isnan(got) && std::isnan(wanted[i])) || got == wanted[i];
    }
    CHECK_THAT(good, c.text() + " on " + name(isa));
  }
}

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel, int64_t offset) {
  if (!takes_case()) return;
  check_operands(c, operands_of(c, random, offset), parallel, offset);
}

TEST(depthwise_of_all_windows) {
  std::mt19937 random(51);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  const Axis one = axis(1);
  const std::vector<std::vector<Axis>> windows = {
      // Windows that have code of their own, with and without edges, and of any remainder.
      {one, same(5, 3), same(23, 3)},      {one, same(6, 3, 2), same(24, 3, 2)},
      {one, same(6, 5), same(17, 5)},      {one, same(7, 5, 2), same(31, 5, 2)},
      {one, axis(4, 3), axis(10, 3)},      {one, axis(6, 5), axis(11, 5, 2)},
      {one, same(5, 2), axis(20, 7, 1, 1, 3, 3)},
      {one, axis(9, 2, 1, 3), axis(19, 3, 1, 2, 1, 2)},
      {one, axis(6, 3, 3, 1, -1, 2), axis(9, 2, 1, 1, 3, -2)},
      {one, axis(9, 3, 2, 2, 1, 1), axis(30, 3, 3, 4, 5, 6)},
      {one, one, same(13, 3)},             {one, axis(5), axis(26)},
      {same(3, 2), same(4, 3), same(5, 3, 2)}, {axis(4, 2, 2, 2, 1, 1), axis(3), axis(17, 7)},
      {one, axis(3, 3, 1, 1, 4, 4), axis(2, 3, 5, 1, 4, 4)},  // windows of zeros alone
      {one, axis(3, 3, 1, 1, 1, 1), axis(1, 5, 1, 3, 9, 9)},  // the elements are far apart
  };
  for (const std::vector<Axis>& axes : windows) {
    for (int64_t channels : {2, 8, 16, 21, 32, 50}) {
      Case c{1 + turn % 3, channels, turn % 5 == 4 ? 4 : 8, {axes[0], axes[1], axes[2]}};
      c.x_dtype = kFloats[turn % 3];
      c.y_dtype = kFloats[turn / 3 % 3];
      c.bias = turn % 2 == 1;
      c.residual = turn / 2 % 2 == 1;
      c.clamps = turn / 4 % 2 == 1;
      check_case(c, random, parallel, turn % 4);
      ++turn;
    }
  }
}

TEST(depthwise_of_many_tasks) {
  std::mt19937 random(52);
  Threads pool(3);
  const Parallel parallel(pool);
  check_case({5, 40, 8, {axis(1), same(30, 3), same(33, 3)}}, random, parallel, 1);
  check_case({1, 64, 4, {axis(1), same(40, 5), same(40, 5)}}, random, parallel, 3);
}

TEST(depthwise_of_what_is_not_finite) {
  std::mt19937 random(53);
  for (DType type : kFloats) {
    Case c{2, 20, 8, {axis(1), same(5, 3), same(12, 3)}};
    c.x_dtype = c.y_dtype = type;
    c.clamps = type == DType::BF16;
    Operands o = operands_of(c, random, 1);
    const float given[] = {NAN, INFINITY, -INFINITY};
    for (int64_t i = 0; i < 3; ++i) set_element(o.x.get(), type, 301 * i + 7, given[i]);
    check_operands(c, o, Parallel(), 1);
  }
}

TEST(depthwise_of_nothing) {
  std::mt19937 random(54);
  for (const Case& c : {Case{0, 4, 8, {axis(1), same(5, 3), same(5, 3)}},
                        Case{2, 4, 8, {axis(1), axis(2, 3), same(5, 3)}},
                        Case{2, 4, 8, {axis(1), axis(0, 3, 1, 1, 2, 2), same(5, 3)}},
                        Case{2, 4, 8, {axis(1), same(5, 3), axis(0, 3, 1, 1, 2, 2)}}}) {
    check_case(c, random, Parallel(), 1);
  }
}

TEST(depthwise_refuses_what_can_not_be) {
  std::mt19937 random(55);
  const Case c{2, 8, 8, {axis(1), same(5, 3), same(5, 3)}};
  const Operands o = operands_of(c, random, 0);
  Buffer y(c.y_size() * 4, 0);
  const auto refused = [&](const std::string& why, const std::function<void(Args&)>& change) {
    Args args = args_of(c, o, &y);
    change(args);
    CHECK_THAT(throws<Error>([&] { depthwise::convolve(args, Parallel(), Isa::kGeneric); }, why),
               why);
  };
  const float scale = 1.0f;
  refused("x and y must be float32", [](Args& a) { a.x_dtype = DType::S8; });
  refused("x and y must be float32", [](Args& a) { a.y_dtype = DType::F64; });
  refused("without scales", [&](Args& a) { a.x_scale = &scale; });
  refused("without scales", [&](Args& a) { a.y_scale = &scale; });
  refused("as many groups", [](Args& a) { a.groups = 1; });
  refused("as many groups", [](Args& a) { a.channels = a.groups = 4; });
  refused("strides and dilations at least 1", [](Args& a) { a.axes[1].stride = 0; });
  refused("must have 12 rows", [](Args& a) { a.axes[1].window = 4; });
  Weights damaged = random_weights(9, c.channels, 0, c.bits, random);
  damaged.buffer.get()[200] ^= 1;
  refused("corrupted quantized values", [&](Args& a) { a.weights = damaged.packed(); });
}

}  // namespace
