"""From float arrays to QArrays: ranges, scales, quantized values."""
