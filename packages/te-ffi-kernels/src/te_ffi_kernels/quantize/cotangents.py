"""Cotangents of quantized values and scales, and of the numbers that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import numbers
from .config import QuantizeConfig
from .modes import qmax, turn


def cotangent_of(primal: jax.Array, value: jax.Array | None) -> Any:
    """Return a value as a cotangent of a primal, None for zero.

    Integers and scales in e8m0 have none. Quantized values in float8 have their own dtype; what is
    beyond a float8 saturates.
    """
    inexact = jnp.issubdtype(primal.dtype, jnp.inexact)
    if value is None or not inexact or primal.dtype == jnp.float8_e8m0fnu:
        return None
    if primal.dtype.itemsize == 1:
        most = np.float32(qmax(primal.dtype))
        value = lax.clamp(-most, value.astype(jnp.float32), most)
    return value.astype(primal.dtype)


def straight_through(
    config: QuantizeConfig,
    shape: tuple[int, ...],
    scales: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
) -> jax.Array:
    """Return the cotangent of quantized numbers, float32 of their shape.

    Args:
        config: how they are quantized. Quantized values in int8 have no cotangent.
        shape: of the numbers.
        scales: by row, and by column.
        cotangents: of the quantized values by row, and by column.
    """
    mode, axis = config.scaling_mode, config.axis
    grad = jnp.zeros(shape, jnp.float32)
    if config.out_dtype == jnp.int8:
        return grad
    wanted = (config.q_layout.has_rowwise, config.q_layout.has_colwise)
    for by_column, given, scale in zip((False, True), cotangents, scales, strict=True):
        if not wanted[by_column]:
            continue
        wide = numbers.spread(scale, shape, mode, axis, by_column=by_column)
        qvalue = turn(given, len(shape) - axis) if by_column and not mode.is_mx else given
        qvalue = qvalue.astype(jnp.float32)
        grad = grad + (numbers.divide_by_power(qvalue, wide) if mode.is_mx else qvalue / wide)
    return grad
