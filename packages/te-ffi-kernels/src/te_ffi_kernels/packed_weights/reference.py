"""Matmuls with packed weights and lookups, in plain JAX."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .layout import group_count
from .weight import PackedWeight

_LEAST_SCALE = float(np.finfo(np.float32).tiny)


def quantize_rows(x: jax.Array, given: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Quantize each row to int8, symmetrically and narrow-range.

    Args:
        x: [*rows, k], any float.
        given: float32[], the scale of all rows; None for one of each.

    Returns:
        Quantized values, int8[*rows, k], and scales, float32[*rows, 1]: the largest magnitude of
        the row times 1 / 127 (what XLA makes of a division by 127), and at least the smallest
        normal float32. Ratios are rounded half to even. The scale of a row with an infinity or NaN
        is infinite or NaN; NaN becomes 0.
    """
    x = x.astype(jnp.float32)
    if given is None:
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0) * np.float32(1 / 127)
    else:
        scale = jnp.full((*x.shape[:-1], 1), given)
    scale = lax.select(scale < _LEAST_SCALE, jnp.full_like(scale, _LEAST_SCALE), scale)
    # An infinite scale would make NaN of the infinities; divided by this, they go to ±127.
    divisor = jnp.where(scale > 2.0**126, np.float32(2.0**126), scale)
    qvalue = lax.round(x / divisor, lax.RoundingMethod.TO_NEAREST_EVEN)
    qvalue = jnp.clip(jnp.where(jnp.isnan(qvalue), np.float32(0), qvalue), -127, 127)
    return qvalue.astype(jnp.int8), scale


def rotate(x: jax.Array, signs: jax.Array, block: int) -> jax.Array:
    """Multiply rows with signs, then their blocks with a Hadamard matrix.

    Args:
        x: [m, k], any float.
        signs: int8[k], 1 or -1.
        block: size of the blocks and of the orthonormal matrix, a power of two that divides k.

    Returns:
        float32[m, k].
    """
    return _hadamard(x.astype(jnp.float32) * signs.astype(jnp.float32)[None], block)


def rotate_back(x: jax.Array, signs: jax.Array, block: int) -> jax.Array:
    """Multiply with the inverse of ``rotate``, for float32[m, k]."""
    return _hadamard(x, block) * signs.astype(jnp.float32)[None]


def _hadamard(x: jax.Array, block: int) -> jax.Array:
    """Multiply blocks of float32[m, k] with the orthonormal Hadamard matrix.

    A fast Walsh-Hadamard transform: sums and differences of pairs, in log2(block) steps.
    """
    m, k = x.shape
    step = 1
    while step < block:  # the order of a kernel, so that results are the same numbers
        pairs = x.reshape(m, k // (2 * step), 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = jnp.stack([first + second, first - second], axis=2)
        step *= 2
    return x.reshape(m, k) * np.float32(1 / math.sqrt(block))


def quantized(
    x: jax.Array, weight: PackedWeight, out_dtype: DTypeLike, scale_of_rows: jax.Array | None = None
) -> jax.Array:
    """Multiply int8 values; see ``te_ffi_kernels.gemm_w8a8``.

    Sums of a group are exact, in int32; for many rows of a weight with groups they are float32.
    """
    groups = group_count(weight.k, weight.group)
    size = weight.k // groups
    # [*rows, groups, size] and [*rows, groups, 1]
    rows, row_scale = quantize_rows(x.reshape(*x.shape[:-1], groups, size), scale_of_rows)
    if _has_many_rows(x, weight):
        rounded = (rows.astype(jnp.float32) * row_scale).reshape(x.shape)
        return _floats(rounded, dequantized(*weight.integers(), weight.k), out_dtype)
    found = []
    for values, scale in weight.parts():
        sums = jnp.einsum(
            "...gk,gkn->...gn",
            rows,
            values.reshape(groups, size, weight.n),
            preferred_element_type=jnp.int32,
        )
        # In this order, each product rounded, as a kernel has to.
        found.append((sums.astype(jnp.float32) * row_scale) * _like(scale, sums))
    if len(found) == 1:
        return found[0].sum(-2).astype(out_dtype)

    # The parts of a group's numbers follow each other. XLA would sum a concatenation's apart.
    def step(total: jax.Array, parts: list[jax.Array]) -> tuple[jax.Array, None]:
        return functools.reduce(jnp.add, parts, total), None

    nothing = jnp.zeros((*x.shape[:-1], weight.n), jnp.float32)
    total, _ = lax.scan(step, nothing, [jnp.moveaxis(part, -2, 0) for part in found])
    return total.astype(out_dtype)


def weight_only(x: jax.Array, weight: PackedWeight, out_dtype: DTypeLike) -> jax.Array:
    """Multiply floats with quantized values and sum in float32; see ``gemm_w8a16``."""
    x = x.astype(jnp.float32)
    if _has_many_rows(x, weight):
        return _floats(x, dequantized(*weight.integers(), weight.k), out_dtype)
    values, scale = weight.integers()
    groups = group_count(weight.k, weight.group)
    # These integers are exact in float32.
    sums = jnp.einsum(
        "...gk,gkn->...gn",
        x.reshape(*x.shape[:-1], groups, weight.k // groups),
        values.astype(jnp.float32).reshape(groups, weight.k // groups, weight.n),
        precision=lax.Precision.HIGHEST,
    )
    return (sums * _like(scale, sums)).sum(-2).astype(out_dtype)


def _has_many_rows(x: jax.Array, weight: PackedWeight) -> bool:
    """Return whether sums of groups would be larger than the weight."""
    rows = math.prod(x.shape[:-1])
    return bool(weight.group) and not (isinstance(rows, int) and 4 * rows < weight.group)


def _floats(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """Multiply in float32."""
    return jnp.matmul(x, weight, precision=lax.Precision.HIGHEST).astype(out_dtype)


def dequantized(qvalue: jax.Array, scale: jax.Array, k: int) -> jax.Array:
    """Return values [*stack, k, n] times scales [*stack, groups, n], in float32."""
    scale = jnp.repeat(scale, k // scale.shape[-2], -2)
    return qvalue.astype(jnp.float32) * scale


def _like(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x` with as many axes as `y`."""
    return lax.expand_dims(x, range(y.ndim - x.ndim))


def take(weight: PackedWeight, indices: jax.Array, axis: int, out_dtype: DTypeLike) -> jax.Array:
    """Take columns or rows, dequantized; see ``te_ffi_kernels.packed_take``."""
    qvalue, scale = weight.integers()
    size = weight.shape[axis]
    at = jnp.clip(jnp.where(indices < 0, indices + size, indices), 0, size - 1)
    qvalue = jnp.take(qvalue, at, axis=axis, mode="clip").astype(jnp.float32)
    rows = weight.group or weight.k
    if axis == 0:
        values = qvalue * jnp.take(scale, at // rows, axis=0, mode="clip")
    else:
        scale = jnp.take(scale, at, axis=1, mode="clip")
        values = jnp.moveaxis(qvalue * jnp.repeat(scale, rows, axis=0), 0, -1)
    return values.astype(out_dtype)
