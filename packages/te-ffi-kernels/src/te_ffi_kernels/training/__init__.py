"""Quantization in the steps of quantized training."""
