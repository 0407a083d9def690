"""Kernels: which one a call gets, and its registration with XLA."""
