// What the table of an instruction set has of all: each has functions of these names.
//
// Included last by the kernels of an instruction set, in their namespace.

constexpr Kernels own_kernels() {
  Kernels k{};
  k.exact8 = exact8;
  k.scaled8 = scaled8;
  k.paired8 = paired8;
  k.rotate = rotate_row;
  k.quantize = quantize_row;
  k.quantize_pairs = quantize_pairs;
  k.finish = finish;
  return k;
}
