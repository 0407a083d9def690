#include "matmul/take.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "matmul/pack.h"

namespace jaxtap {
namespace {

void put(uint8_t* out, DType dtype, int64_t index, float value) {
  if (dtype == DType::F32) {
    std::memcpy(out + 4 * index, &value, 4);
    return;
  }
  const uint16_t half = dtype == DType::BF16 ? f32_to_bf16(value) : f32_to_f16(value);
  std::memcpy(out + 2 * index, &half, 2);
}

}  // namespace

void take(const Take& args, const Parallel& parallel) {
  const PackedWeights& w = args.weights;
  const PanelLayout& layout = w.layout;
  check_size(layout, w.n, w.panels, w.panel_bytes);
  if (args.dtype != DType::F32 && args.dtype != DType::BF16 && args.dtype != DType::F16) {
    throw invalid_argument("take: the result must be float32, bfloat16 or float16, got ",
                           name(args.dtype));
  }
  const int64_t size = args.columns ? w.n : layout.k, width = args.columns ? layout.k : w.n;
  if (args.count == 0 || width == 0) return;
  if (size == 0) throw invalid_argument("take: the weight has nothing to take from");
  const uint8_t* buffer = static_cast<const uint8_t*>(w.buffer);
  const int64_t across = layout.columns();
  const auto header = [&](int64_t panel) {
    const int columns = panel_columns(w.n, panel, across);
    return check_header(buffer + panel * w.panel_bytes, layout, columns, panel);
  };
  if (!args.columns) {  // which reads all panels
    uint64_t key = 0;
    for (int64_t i = 0; i < w.panels; ++i) key += header(i);
    check_payloads(buffer, layout, 0, w.panels, key, parallel);
  }
  const int64_t group = layout.group == 0 ? layout.padded_k() : layout.group;
  const auto value = [&](int64_t row, int64_t column) {
    const uint8_t* panel = buffer + column / across * w.panel_bytes;
    const int64_t c = column % across;
    return static_cast<float>(panel_number(panel, layout, row, static_cast<int>(c))) *
           panel_scale(panel, layout, row / group, c);
  };
  uint8_t* out = static_cast<uint8_t*>(args.out);
  parallel.ranges(args.count, std::max<int64_t>(1, 4096 / width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int32_t given;
      std::memcpy(&given, args.indices + i, 4);
      const int64_t wrapped = given < 0 ? given + size : given;
      const int64_t at = std::clamp<int64_t>(wrapped, 0, size - 1);
      if (args.columns) {
        const int64_t panel = at / across;
        check_payloads(buffer + panel * w.panel_bytes, layout, panel, 1, header(panel),
                       Parallel());
      }
      for (int64_t j = 0; j < width; ++j) {
        put(out, args.dtype, i * width + j, args.columns ? value(j, at) : value(at, j));
      }
    }
  });
}

}  // namespace jaxtap
