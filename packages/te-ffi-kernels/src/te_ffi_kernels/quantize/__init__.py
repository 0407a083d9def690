"""Transformer Engine's quantization and matrix products, with its arguments and mathematics."""
