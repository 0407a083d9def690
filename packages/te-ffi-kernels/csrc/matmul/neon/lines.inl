// Lines of four rows of K as they lie, for instructions that add the products of four bytes in each
// lane: a vector is four columns.
using Eight = int8x8_t;

JAXTAP_INLINE Eight eight_of(int8x8_t x) { return x; }

// Each is read where it is multiplied: four at once would leave no registers.
struct Lines {
  const uint8_t* from;

  uint8x16_t at(int line) const { return vld1q_u8(from + 16 * line); }
};

JAXTAP_INLINE Lines lines_at(const uint8_t* from) { return {from}; }
