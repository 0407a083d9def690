"""How much memory beside operands and results a product takes, by platform."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._workspace import CUBLASLT, PART, bytes_of
from .layout import COLUMNS, group_count, padded_rows

FEW_ROWS = 64
"""Up to so many rows, kernels on CUDA read the panels; for more, most weights are unpacked."""


def of_product(
    op: str, shape: tuple[int, int, int], dtype: Any, platform: str, x: Any, buffer: Any
) -> int | None:
    """Bytes of the workspace of a product, or None where its kernel has none.

    Args:
        op: the op.
        shape: k, n and group of the whole weight.
        dtype: of the result.
        platform: where it runs.
        x: as the kernel gets it: of the rows and panels, these may be a block.
        buffer: the panels.
    """
    if platform != "cuda":
        return None
    cuda = beside_cublaslt(op, shape, dtype, x, buffer)
    if multiplies_with_cublaslt(op, x.shape[0], shape[2]):
        return PART + cuda + CUBLASLT
    # XLA's arrays have bytes.
    return PART + cuda if cuda else 1


def multiplies_with_cublaslt(op: str, rows: int, group: int) -> bool:
    """Whether cuBLASLt multiplies. Otherwise a kernel of te-ffi-kernels-cuda13 does."""
    return rows > FEW_ROWS and not (op == "gemm_w8a8" and group)


def beside_cublaslt(op: str, shape: tuple[int, int, int], dtype: Any, x: Any, buffer: Any) -> int:
    """Bytes that te-ffi-kernels-cuda13 takes for what it does before and after cuBLASLt's product.

    The same as PackedSteps of its csrc/cuda/gemm/packed.cc.
    """
    (k, n, group), m, cols = shape, x.shape[0], COLUMNS * buffer.shape[0]
    library = multiplies_with_cublaslt(op, m, group)
    parts = []
    if op == "gemm_w8a8":
        depth = padded_rows(k, group)
        parts += [m * depth, 4 * m * group_count(k, group)]
        weight = cols * depth
    else:
        parts += [4 * m] * library
        half = x.dtype != jnp.float32
        weight = cols * k * x.dtype.itemsize * (2 if group and half else 1)
    if library:
        parts += [weight, 4 * cols]
        # Panels are shared out among devices where all of them are full.
        if dtype != jnp.float32 or n % COLUMNS:
            parts.append(4 * m * cols)
    return bytes_of(parts)
