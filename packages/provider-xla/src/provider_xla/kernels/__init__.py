"""Kernels: which package computes a matmul with a stored weight, and how it is packed for it."""
