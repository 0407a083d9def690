"""Floats to quantized values and back, in the kernels' order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .modes import BLOCK, ScalingMode, qmax

_INF = 0x7F800000
_LEAST_NORMAL = 0x00800000


def magnitudes(x: jax.Array) -> jax.Array:
    """Return |x|'s bits as int32; 0 for NaN and subnormals.

    These are ordered as the magnitudes are, so their maximum is exact and ignores NaN.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & np.int32(0x7FFFFFFF)
    return jnp.where((bits > _INF) | (bits < _LEAST_NORMAL), 0, bits)


def absmax_bits(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Return the maximum of ``magnitudes``; 0 of nothing."""
    return jnp.max(magnitudes(x), axis=axis, initial=0)


def of_bits(bits: jax.Array) -> jax.Array:
    """Return the float32 of bits."""
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def encode(ratio: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round float32 to quantized values, half to even, saturating.

    NaN becomes NaN (0x7f) in float8, and 0 in int8.
    """
    dtype = jnp.dtype(dtype)
    most = np.float32(qmax(dtype))
    nan = ratio != ratio
    cut = lax.clamp(-most, jnp.where(nan, 0, ratio), most)
    if dtype == jnp.int8:
        return lax.round(cut, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)
    qvalue = lax.bitcast_convert_type(cut.astype(dtype), jnp.uint8)
    return lax.bitcast_convert_type(jnp.where(nan, np.uint8(0x7F), qvalue), dtype)


def channel_scale(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return a slice's factor: largest quantized value over largest magnitude.

    It is 1 if that magnitude is 0 or infinite, and at most 2**126, so that its inverse isn't
    subnormal.

    Args:
        bits: the largest magnitudes, as ``absmax_bits`` returns them.
        dtype: dtype of the quantized values.
    """
    usable = (bits > 0) & (bits < _INF)
    most = of_bits(jnp.where(usable, bits, _LEAST_NORMAL))
    scale = jnp.minimum(np.float32(qmax(dtype)) / most, np.float32(2.0**126))
    return jnp.where(usable, scale, np.float32(1))


def block_scale(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the biased exponent of the least scale that saturates nothing.

    uint8: 254 for an infinity, 0 for zeros. Both float8 formats end at 1.75 times a power of two.

    Args:
        bits: the largest magnitudes, as ``absmax_bits`` returns them.
        dtype: dtype of the quantized values.
    """
    exponent = 8 if jnp.dtype(dtype) == jnp.float8_e4m3fn else 15
    up = ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    scale = jnp.maximum((bits >> 23) - exponent + up, 0)
    return jnp.where(bits >= _INF, 254, scale).astype(jnp.uint8)


def divide_by_power(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / 2**(scale - 127) for uint8 scales, avoiding subnormal factors."""
    scale = scale.astype(jnp.int32)
    # 2**(127 - scale) is subnormal from 254 on, and may count as zero: there it is two factors.
    low = scale >= 254
    return (
        x
        * of_bits(jnp.where(low, 1, 254 - scale) << 23)
        * jnp.where(low, 0.5, 1.0).astype(jnp.float32)
    )


def multiply_by_power(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x * 2**(scale - 127) for uint8 scales; 255 gives NaN."""
    scale = scale.astype(jnp.int32)
    bits = jnp.where(scale == 255, 0x7FC00000, jnp.maximum(scale, 1) << 23)
    return x * of_bits(bits) * jnp.where(scale == 0, 0.5, 1.0).astype(jnp.float32)


def as_bytes(scales: jax.Array) -> jax.Array:
    """Return MX scales, in float8_e8m0fnu or uint8, as uint8."""
    return scales if scales.dtype == jnp.uint8 else lax.bitcast_convert_type(scales, jnp.uint8)


def spread(
    scales: jax.Array, shape: tuple[int, ...], mode: ScalingMode, axis: int, *, by_column: bool
) -> jax.Array:
    """Return scales that broadcast against an array flattened at `axis`."""
    if mode.is_tensor:
        return scales.reshape(())
    if mode.is_mx:
        at = axis - 1 if by_column else len(shape) - 1
        return jnp.repeat(as_bytes(scales), BLOCK, axis=at)
    if by_column:
        return scales.reshape((1,) * axis + shape[axis:])
    return scales.reshape(shape[:axis] + (1,) * (len(shape) - axis))


def decode(
    qvalue: jax.Array, scales: jax.Array, mode: ScalingMode, axis: int, *, by_column: bool
) -> jax.Array:
    """Return quantized values times their scales, in float32."""
    numbers = qvalue.astype(jnp.float32)
    wide = spread(scales, qvalue.shape, mode, axis, by_column=by_column)
    return multiply_by_power(numbers, wide) if mode.is_mx else numbers * wide
