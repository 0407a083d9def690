"""QArrays: quantized values with scales, their moves and their other forms."""
