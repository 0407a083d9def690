"""Kernels: which package computes a matmul, and its packed weight."""
