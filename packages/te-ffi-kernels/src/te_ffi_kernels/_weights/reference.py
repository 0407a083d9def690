"""The products with packed weights, and packing, in plain JAX: what the kernels compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .layout import group_count
from .pack import layout_of
from .packed import PackedWeight

_LEAST_SCALE = float(np.finfo(np.float32).tiny)


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes each row to int8, symmetrically and narrow-range.

    Args:
        x: [*rows, k], any float.

    Returns:
        Codes, int8[*rows, k], and scales, float32[*rows, 1]: the largest magnitude of the row times
        1 / 127 (what XLA makes of a division by 127), and at least the smallest normal float32.
        Ratios are rounded half to even. A row with an infinity or NaN has a scale that is one; NaN
        gets code 0.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0) * np.float32(1 / 127)
    scale = lax.select(scale < _LEAST_SCALE, jnp.full_like(scale, _LEAST_SCALE), scale)
    # An infinite scale would make NaN of the infinities; divided by this, they go to ±127.
    divisor = jnp.where(scale > 2.0**126, np.float32(2.0**126), scale)
    codes = lax.round(x / divisor, lax.RoundingMethod.TO_NEAREST_EVEN)
    codes = jnp.clip(jnp.where(jnp.isnan(codes), np.float32(0), codes), -127, 127)
    return codes.astype(jnp.int8), scale


def gemm_w8a8(
    x: jax.Array, weight: PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiplies int8 codes and sums in int32; see ``te_ffi_kernels.gemm_w8a8``."""
    codes, scale = weight.unpack()
    groups = group_count(weight.k, weight.group)
    size = weight.k // groups
    # [*rows, groups, size] and [*rows, groups, 1]
    rows, row_scale = quantize_rows(x.reshape(*x.shape[:-1], groups, size))
    sums = jnp.einsum(
        "...gk,gkn->...gn",
        rows,
        codes.reshape(groups, size, weight.n),
        preferred_element_type=jnp.int32,
    )
    # In this order, each product rounded, as a kernel has to.
    parts = (sums.astype(jnp.float32) * row_scale) * _like(scale, sums)
    return parts.sum(-2).astype(x.dtype if out_dtype is None else out_dtype)


def weight_only(
    x: jax.Array, weight: PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiplies floats with codes and sums in float32; see ``te_ffi_kernels.gemv_w8``."""
    codes, scale = weight.unpack()
    scale = scale.astype(jnp.float32)
    groups = group_count(weight.k, weight.group)
    # Codes are exact in every float dtype.
    sums = jnp.einsum(
        "...gk,gkn->...gn",
        x.astype(jnp.float32).reshape(*x.shape[:-1], groups, weight.k // groups),
        codes.astype(jnp.float32).reshape(groups, weight.k // groups, weight.n),
        precision=lax.Precision.HIGHEST,
    )
    y = (sums * _like(scale, sums)).sum(-2)
    return y.astype(x.dtype if out_dtype is None else out_dtype)


def _like(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` with as many axes as `y`."""
    return lax.expand_dims(x, range(y.ndim - x.ndim))


def packed_take(
    weight: PackedWeight, indices: jax.Array, *, axis: int = 1, out_dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Take columns or rows, dequantized; see ``te_ffi_kernels.packed_take``."""
    codes, scale = weight.unpack()
    size = weight.shape[axis]
    at = jnp.clip(jnp.where(indices < 0, indices + size, indices), 0, size - 1)
    codes = jnp.take(codes, at, axis=axis, mode="clip").astype(jnp.float32)
    scale = scale.astype(jnp.float32)
    rows = weight.group or weight.k
    if axis == 0:
        values = codes * jnp.take(scale, at // rows, axis=0, mode="clip")
    else:
        scale = jnp.take(scale, at, axis=1, mode="clip")
        values = jnp.moveaxis(codes * jnp.repeat(scale, rows, axis=0), 0, -1)
    return values.astype(out_dtype)


gemm_w8a16 = gemv_w8 = gemv_w4 = weight_only


def pack_w8(codes: jax.Array, scale: jax.Array) -> PackedWeight:
    """Pack a weight in 8 bits; see ``te_ffi_kernels.pack_w8``."""
    return _pack("pack_w8", codes, scale, 8)


def pack_w4(codes: jax.Array, scale: jax.Array, *, version: int | None = None) -> PackedWeight:
    """Pack a weight in 4 bits; see ``te_ffi_kernels.pack_w4``."""
    return _pack("pack_w4", codes, scale, 4, version)


def _pack(
    op: str, codes: jax.Array, scale: jax.Array, bits: int, version: int | None = None
) -> PackedWeight:
    layout = layout_of(op, codes, scale, bits, version)
    one = layout.pack
    for _ in codes.shape[:-2]:
        one = jax.vmap(one)
    return PackedWeight.of(one(codes.astype(jnp.int8), scale), codes.shape[-1], layout)
