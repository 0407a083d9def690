// What the tables of instruction sets have in common: each has functions of these names. AMX, whose
// tiles are wider and signed, says otherwise.
//
// Included last by the kernels of an instruction set, in their namespace.

constexpr Kernels own_kernels() {
  Kernels k{};
  k.task_steps = 30000;
  k.least_rows = 1;
  k.expand_panel = expand_panel<false>;
  k.exact8 = exact8;
  k.scaled8 = scaled8;
  k.two_digits8 = two_digits8;
  k.rotate = rotate_row;
  k.quantize = quantize_row;
  k.quantize_pairs = quantize_pairs;
  k.epilogue = epilogue;
  return k;
}
