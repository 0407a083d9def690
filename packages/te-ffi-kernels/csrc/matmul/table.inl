// What the tables of instruction sets have in common: each has functions of these names. AMX, whose
// tiles are wider and whose panels of 4 bits become signed, says otherwise. `is_signed`: whether
// quantized values less the zero point are multiplied.
//
// Included last by the kernels of an instruction set, in their namespace.

constexpr Kernels own_kernels(int64_t block_panels, int64_t block_k,
                              void (*stream)(const Stream&), bool is_signed) {
  Kernels k{};
  k.block_panels = block_panels;
  k.block_k = block_k;
  k.stream = stream;
  k.signed_sums = k.expands_signed = is_signed;
  k.task_steps = 30000;
  k.least_rows = 1;
  k.expand_panel = is_signed ? expand_panel<true> : expand_panel<false>;
  k.exact8 = exact8;
  k.scaled8 = scaled8;
  k.two_digits8 = two_digits8;
  k.rotate = rotate_row;
  k.quantize = quantize_row;
  k.quantize_pairs = quantize_pairs;
  k.epilogue = epilogue;
  return k;
}
