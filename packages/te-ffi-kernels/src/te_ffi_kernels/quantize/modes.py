"""Transformer Engine's scaling modes, and the shapes of scales."""

from __future__ import annotations

import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

BLOCK = 32
"""Numbers that share an MX scale."""


class ScalingMode(enum.IntEnum):
    """What shares a scale, with Transformer Engine's numbers.

    - DELAYED_TENSOR_SCALING, CURRENT_TENSOR_SCALING: one float32 for all, given by the caller: of
      earlier arrays, or of this one (see ``compute_scale_from_amax``).
    - MXFP8_1D_SCALING: one power of two (float8_e8m0fnu) for each 32 numbers along the columns, or
      along the rows (OCP Microscaling Formats specification v1.0). Scales are neither padded nor
      swizzled, which cuBLAS alone asks for: one for each block, in the order of the blocks.
    - CHANNEL_SCALING: ours, which Transformer Engine doesn't have: one float32 for each row, or for
      each column, computed by the op.
    - NVFP4_1D_SCALING, NVFP4_2D_SCALING: named so that ops can refuse them; no kernel has them.
    """

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5
    CHANNEL_SCALING = 64

    @property
    def is_tensor(self) -> bool:
        """Return whether one scale is for the whole array."""
        return self in (self.DELAYED_TENSOR_SCALING, self.CURRENT_TENSOR_SCALING)

    @property
    def is_mx(self) -> bool:
        """Return whether scales are powers of two for blocks of 32."""
        return self is self.MXFP8_1D_SCALING

    @property
    def scale_dtype(self) -> Any:
        """Return the dtype of the scales."""
        return jnp.dtype(jnp.float8_e8m0fnu if self.is_mx else jnp.float32)


class QuantizeLayout(enum.IntEnum):
    """Whether there are results by row, by column or both, with Transformer Engine's numbers."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2

    @property
    def has_rowwise(self) -> bool:
        """Return whether quantized values have scales along rows."""
        return self is not self.COLWISE

    @property
    def has_colwise(self) -> bool:
        """Return whether quantized values have scales along columns."""
        return self is not self.ROWWISE


def qmax(dtype: DTypeLike) -> float:
    """Return the largest quantized value: 448 or 57344 (float8), 127 (int8)."""
    found = jnp.dtype(dtype)
    return 127.0 if found == jnp.int8 else float(jnp.finfo(found).max)


def positive_axis(axis: int, ndim: int) -> int:
    """Return the axis counted from the front."""
    return axis + ndim if axis < 0 else axis


def turned(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the transposed shape of an array flattened at `axis`."""
    return (*shape[axis:], *shape[:axis])


def turn(x: jax.Array, axis: int) -> jax.Array:
    """Transpose the matrix of an array that is flattened at `axis`."""
    return jnp.transpose(x, turned(tuple(range(x.ndim)), axis))


def scale_shape(
    shape: tuple[int, ...], mode: ScalingMode, axis: int, *, by_column: bool
) -> tuple[int, ...]:
    """Return the scales' shape of an array flattened at `axis`.

    MX scales have the shape of the array, but one for 32 numbers along the last axis (by column:
    along the axis before `axis`). Scales of channels have the axes before `axis` (by column: those
    from it on).
    """
    if mode.is_mx:
        at = axis - 1 if by_column else len(shape) - 1
        return (*shape[:at], shape[at] // BLOCK, *shape[at + 1 :])
    if mode is ScalingMode.CHANNEL_SCALING:
        return shape[axis:] if by_column else shape[:axis]
    return (1,)


def grouped_scale_size(
    shape: tuple[int, ...], groups: int, mode: ScalingMode, axis: int, *, by_column: bool
) -> int:
    """Return the number of scales of all groups together."""
    if mode.is_mx:
        return math.prod(shape) // BLOCK
    if mode is ScalingMode.CHANNEL_SCALING:
        return groups * math.prod(shape[axis:]) if by_column else math.prod(shape[:axis])
    return groups


def compute_scale_from_amax(
    amax: jax.Array, q_dtype: DTypeLike, margin: float = 0.0, scale: jax.Array | None = None
) -> jax.Array:
    """Return the factor that maps the largest magnitude to the largest value.

    Args:
        amax: float32, the largest magnitude.
        q_dtype: float8_e4m3fn, float8_e5m2 or int8.
        margin: powers of two to leave free.
        scale: what to return where `amax` is zero, infinite or NaN; 1 without.

    Returns:
        float32, in the shape of `amax`: ``largest quantized value / amax / 2**margin``. If that
        overflows it is the largest float32.
    """
    amax = jnp.asarray(amax, jnp.float32)
    otherwise = jnp.ones_like(amax) if scale is None else jnp.broadcast_to(scale, amax.shape)
    usable = (amax > 0) & jnp.isfinite(amax)
    found = jnp.float32(qmax(q_dtype)) / jnp.where(usable, amax, 1) / jnp.float32(2**margin)
    return jnp.where(usable, jnp.minimum(found, jnp.finfo(jnp.float32).max), otherwise)
