"""Matmuls of groups of rows, each with its own matrix, after Transformer Engine."""
