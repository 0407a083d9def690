"""Matmuls of floats, or of quantized values with scales, after Transformer Engine."""
