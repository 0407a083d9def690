"""Transformer Engine's quantization and matmuls, with its arguments and mathematics."""
