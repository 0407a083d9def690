"""Cotangents: what they are in the dtypes of codes and scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import numbers
from .modes import ScalingMode, qmax


def cotangent_of(primal: jax.Array, value: jax.Array | None) -> Any:
    """`value` (None: zero) as a cotangent of `primal`.

    Integers have float0. Scales in e8m0, which has no zero, and codes in float8 have their own
    dtype; what is beyond a float8 saturates.
    """
    if not jnp.issubdtype(primal.dtype, jnp.inexact):
        return np.zeros(primal.shape, jax.dtypes.float0)
    if value is None or primal.dtype == jnp.float8_e8m0fnu:
        if primal.dtype.itemsize == 1:
            return lax.bitcast_convert_type(jnp.zeros(primal.shape, jnp.uint8), primal.dtype)
        return jnp.zeros(primal.shape, primal.dtype)
    if primal.dtype.itemsize == 1:
        most = np.float32(qmax(primal.dtype))
        value = lax.clamp(-most, value.astype(jnp.float32), most)
    return value.astype(primal.dtype)


def undo(cotangent: jax.Array, scales: jax.Array, mode: ScalingMode) -> jax.Array:
    """Of numbers, from that of their codes: over the scales."""
    wide = cotangent.astype(jnp.float32)
    return numbers.divide_by_power(wide, scales) if mode.is_mx else wide / scales
