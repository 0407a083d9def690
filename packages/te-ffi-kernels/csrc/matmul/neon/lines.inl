// Lines of four rows of K as they lie, for instructions that add the products of four bytes in each
// lane: a vector is four columns.
using Eight = int8x8_t;

JAXTAP_INLINE Eight eight_of(int8x8_t x) { return x; }

JAXTAP_INLINE uint8x16x4_t load_lines(const uint8_t* from) {
  return {{vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
}
