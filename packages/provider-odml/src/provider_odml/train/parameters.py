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
    if use.method == "absmax" and qn.get_qtype(use.qtype).qmax >= 4 and x.dtype == jnp.float32:
        return _nearest(x, use)
    return qn.fake_quant(x, use.qtype, channel_axes=use.channel_axes, method=use.method)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _nearest(x: jax.Array, use: WeightUse) -> jax.Array:
    """``qn.fake_quant`` by absmax, in fewer operations: none is beyond the largest integer."""
    channels = {axis % x.ndim for axis in use.channel_axes}
    axes = tuple(axis for axis in range(x.ndim) if axis not in channels)
    largest = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0)
    scale = largest / np.float32(qn.get_qtype(use.qtype).qmax)
    scale = lax.max(scale, lax.full_like(scale, jnp.finfo(jnp.float32).tiny))
    # The reciprocal of a greater one is subnormal.
    divisor = lax.min(scale, lax.full_like(scale, 2.0**126))
    return lax.round(x / divisor, lax.RoundingMethod.TO_NEAREST_EVEN) * scale


@_nearest.defjvp
def _nearest_jvp(use: WeightUse, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _nearest(primals[0], use), tangents[0]


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
