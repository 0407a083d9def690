"""Fake quantization of parameters, constants and rows to their own ranges."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn

from ..decide.decision import ConstantUse, DynamicUse, WeightUse
from .once import traced_once


@traced_once(1)
def fake_quant_weight(x: jax.Array, use: WeightUse) -> jax.Array:
    """Round a parameter to the ranges of its channels, straight through."""
    if use.tile_size is not None:
        return _in_blocks(x, use)
    if use.method == "absmax" and qn.get_qtype(use.qtype).qmax >= 4 and x.dtype == jnp.float32:
        return _nearest(x, use)
    return qn.fake_quant(x, use.qtype, channel_axes=use.channel_axes, method=use.method)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _nearest(x: jax.Array, use: WeightUse) -> jax.Array:
    """``qn.fake_quant`` by absmax, in fewer operations: none is beyond the largest integer."""
    channels = {axis % x.ndim for axis in use.channel_axes}
    axes = tuple(axis for axis in range(x.ndim) if axis not in channels)
    # In lax alone: jnp's functions are calls, and each of a model's shapes of parameters is traced.
    largest = lax.expand_dims(lax.reduce_max(lax.abs(x), axes), axes)
    scale = lax.div(largest, lax.full_like(largest, qn.get_qtype(use.qtype).qmax))
    scale = lax.max(scale, lax.full_like(scale, jnp.finfo(jnp.float32).tiny))
    # The reciprocal of a greater one is subnormal.
    divisor = lax.min(scale, lax.full_like(scale, 2.0**126))
    places = range(x.ndim)
    steps = lax.div(x, lax.broadcast_in_dim(divisor, x.shape, places))
    steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    return lax.mul(steps, lax.broadcast_in_dim(scale, x.shape, places))


@_nearest.defjvp
def _nearest_jvp(use: WeightUse, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _nearest(primals[0], use), tangents[0]


def quantized_blocks(x: jax.Array, use: WeightUse) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a parameter in blocks: quantized values, scales, and the ranges that they are from.

    A scale is a number that both bfloat16 and float16 have: the file has it in float16, and
    XNNPACK multiplies with it in bfloat16.

    Args:
        x: float array.
        use: how it is quantized, with a ``tile_size``.

    Returns:
        Whole numbers, float32[blocks, tile size, *others], and scales and ranges,
        float32[blocks, 1, *others]. Blocks run along the tiled axes; the others are as in `x`.
    """
    parts = _split(x.astype(jnp.float32), use)
    channels = tuple(axis for axis in range(parts.ndim) if axis != 1)
    found = qn.calibrate(parts, use.qtype, channel_axes=channels, method=use.method)
    scale, _, _ = qn.scale_of(found, use.qtype)
    short = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
    steps = lax.clamp(1.0, lax.round(short * _STEPS, _EVEN), _MOST_SCALE * _STEPS)
    scale = steps * np.float32(1 / _STEPS)
    most = np.float32(qn.get_qtype(use.qtype).qmax)
    return lax.clamp(-most, lax.round(parts / scale, _EVEN), most), scale, found.upper


_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN
_STEPS = np.float32(2.0**24)
"""In 1: of float16's subnormal numbers. Eight digits times them are exact in float32."""
_MOST_SCALE = np.float32(65280)
"""The largest number that bfloat16 and float16 have."""


def _split(x: jax.Array, use: WeightUse) -> jax.Array:
    """Return a parameter as [blocks, tile size, *others]."""
    others = [axis for axis in range(x.ndim) if axis not in use.tiled_axes]
    rows = x.transpose([*use.tiled_axes, *others])
    return rows.reshape(-1, use.tile_size, *(x.shape[axis] for axis in others))


def _joined(parts: jax.Array, use: WeightUse, shape: tuple[int, ...]) -> jax.Array:
    """Return a parameter of a shape from what ``_split`` returned."""
    order = [*use.tiled_axes, *(a for a in range(len(shape)) if a not in use.tiled_axes)]
    return parts.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _in_blocks(x: jax.Array, use: WeightUse) -> jax.Array:
    values, scale, _ = quantized_blocks(x, use)
    return _joined(values * scale, use, x.shape).astype(x.dtype)


@_in_blocks.defjvp
def _in_blocks_jvp(use: WeightUse, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    if qn.parse_calibration_method(use.method).clips:
        parts = _split(x.astype(jnp.float32), use)
        inside = lax.abs(parts) <= quantized_blocks(x, use)[2]
        inside = _joined(inside, use, x.shape)
        tangent = lax.select(inside, tangent, lax.full_like(tangent, 0))
    return _in_blocks(x, use), tangent


@traced_once(1)
def fake_quant_constant(x: jax.Array, use: ConstantUse) -> jax.Array:
    """Round a constant to its range, straight through."""
    method = "minmax" if use.qtype == "int8" else "absmax"
    return qn.fake_quant(x, use.qtype, method=method)


@traced_once(1)
def fake_quant_dynamic(x: jax.Array, use: DynamicUse) -> jax.Array:
    """Round each row of an activation to its range, straight through.

    With a zero point for each row, as LiteRT's XNNPACK kernels (``qd8``) do.
    """
    return qn.fake_quant(x, "int8", channel_axes=use.channel_axes, method="minmax")
