"""Kernels: which one a call gets, and how it becomes an XLA FFI target."""
