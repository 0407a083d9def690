"""Matmuls with weights in 8 and 4 bits, and how these are packed."""
