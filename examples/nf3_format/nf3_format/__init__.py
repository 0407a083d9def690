"""A 3-bit NormalFloat for jaxtap."""
