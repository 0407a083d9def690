// Exact sums over K, and what becomes of them. Included by kernels.cc.

// Up to 32 rows by 2 panels.
struct Block {
  Shape shape;
  int64_t row = 0, panel = 0;  // the first
};

// Adds products to those of `t.sums`, or to zeros, in the tiles.
void multiply_block(const Tile& t, const Block& b, bool zero) {
  configure(b.shape);
  if (zero) {
    zero_sums(b.shape);
  } else {
    load_sums(b.shape, t.sums + b.row * t.sums_stride + 16 * b.panel, t.sums_stride);
  }
  Operands o = operands_at(t, b.row, b.panel);
  const int8_t* x = o.x;
  for (int64_t run = 0; run < t.runs; ++run, o.qvalues += 16 * t.k) {
    o.x = x + t.x_runs[run];
    t.offsets == nullptr ? add_products<true>(o, b.shape, t.k)
                         : add_products<false>(o, b.shape, t.k);
  }
}

// What the sums of a row are less by.
uint32_t offset_of(const Tile& t, int64_t row) {
  const bool none = t.offsets == nullptr || !t.first;
  return none ? 0 : static_cast<uint32_t>(t.offsets[row * t.offsets_stride]);
}

// In `t.sums`.
void sum_block(const Tile& t, const Block& b) {
  int32_t* sums = t.sums + b.row * t.sums_stride + 16 * b.panel;
  for (int64_t r = 0; t.first && r < b.shape.rows; ++r) {
    const auto start = static_cast<int32_t>(0u - offset_of(t, b.row + r));
    for (int64_t c = 0; c < 16 * b.shape.panels; ++c) sums[r * t.sums_stride + c] = start;
  }
  multiply_block(t, b, false);
  store_sums(b.shape, sums, t.sums_stride);
}

// Whole sums of one digit, [rows][32], to rows of y.
template <bool kAdds, bool kHalf, int kPanels>
void epilogue_block(const Tile& t, const Block& b, const int32_t* sums) {
  const Epilogue& f = *t.epilogue;
  Output out = f.out;  // a copy: nothing to read again after numbers of y are stored
  if (!kHalf) out.dtype = DType::F32;
  Floats scales[kPanels];
  for (int p = 0; p < kPanels; ++p) load(f.scales + (b.panel + p) * f.scales_stride, &scales[p]);
  const float* row_scales = f.row_scales;
  const int64_t rows = b.row + b.shape.rows, column = 16 * b.panel;
  for (int64_t r = b.row; r < rows; ++r, sums += 32) {
    const uint32_t offset = offset_of(t, r);
    const float row_scale = row_scales[r];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      if (column + 16 * p >= out.columns) break;
      Words sum;
      load(sums + 16 * p, &sum);
      const Floats value =
          __builtin_convertvector((Ints)(sum - offset), Floats) * row_scale * scales[p];
      float values[16];
      __builtin_memcpy(values, &value, 64);
      store_16<kAdds>(out, r, column + 16 * p, values);
    }
  }
}

template <bool kAdds, bool kHalf>
void epilogue_block(const Tile& t, const Block& b, const int32_t* sums) {
  b.shape.panels == 1 ? epilogue_block<kAdds, kHalf, 1>(t, b, sums)
                      : epilogue_block<kAdds, kHalf, 2>(t, b, sums);
}

void epilogue_block(const Tile& t, const Block& b, const int32_t* sums) {
  const bool half = t.epilogue->out.dtype != DType::F32;
  if (adds(t.epilogue->out)) {
    half ? epilogue_block<true, true>(t, b, sums) : epilogue_block<true, false>(t, b, sums);
  } else {
    half ? epilogue_block<false, true>(t, b, sums) : epilogue_block<false, false>(t, b, sums);
  }
}

void exact8(const Tile& t) {
  alignas(64) int32_t sums[2][32 * kRows];
  Block b, before;
  int turn = 0;
  b.shape.chunk = chunk_of(t.k);
  for (b.panel = 0; b.panel < t.panels; b.panel += 2) {
    b.shape.panels = t.panels - b.panel < 2 ? 1 : 2;
    for (b.row = 0; b.row < t.rows; b.row += kRows) {
      b.shape.rows = t.rows - b.row < kRows ? t.rows - b.row : kRows;
      if (t.epilogue == nullptr) {
        sum_block(t, b);
        continue;
      }
      // The tiles multiply a block while the sums of the one before are rescaled.
      multiply_block(t, b, t.first);
      store_sums(b.shape, sums[turn], 32);
      turn = 1 - turn;
      if (before.shape.rows != 0) epilogue_block(t, before, sums[turn]);
      before = b;
    }
  }
  if (before.shape.rows != 0) epilogue_block(t, before, sums[1 - turn]);
}
