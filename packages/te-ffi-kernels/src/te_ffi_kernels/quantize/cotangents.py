"""Cotangents of quantized values, scales, and their sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..groups import as_rows, only_owned, owner, per_row
from . import numbers
from .config import QuantizeConfig
from .modes import BLOCK, qmax, turn


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
        shape: shape of the numbers.
        scales: scales by row, and by column.
        cotangents: cotangents of the quantized values by row, and by column.
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


def grouped_straight_through(
    config: QuantizeConfig,
    shape: tuple[int, ...],
    group_sizes: jax.Array,
    scales: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
) -> jax.Array:
    """Return the cotangent of numbers quantized in groups, float32.

    Args:
        config: how they are quantized.
        shape: shape of the numbers; those of no group have zero.
        group_sizes: int32[groups], how much of the first axis each group has.
        scales: scales by row, and by column.
        cotangents: cotangents of the quantized values by row, and by column.
    """
    mode, axis = config.scaling_mode, config.axis
    rows, cols = math.prod(shape[:axis]), math.prod(shape[axis:])
    grad = jnp.zeros((rows, cols), jnp.float32)
    if config.out_dtype == jnp.int8:
        return grad.reshape(shape)
    groups, sizes = group_sizes.shape[0], group_sizes * math.prod(shape[1:axis])
    owners = owner(sizes, rows)
    wanted = (config.q_layout.has_rowwise, config.q_layout.has_colwise)
    for by_column, given, scale in zip((False, True), cotangents, scales, strict=True):
        if not wanted[by_column]:
            continue
        turned = by_column and not mode.is_mx
        of_rows = as_rows(given, sizes, rows) if turned else given.reshape(rows, cols)
        of_rows = of_rows.astype(jnp.float32)
        if mode.is_mx:
            at = (rows // BLOCK, cols) if by_column else (rows, cols // BLOCK)
            wide = jnp.repeat(numbers.as_bytes(scale).reshape(at), BLOCK, axis=not by_column)
            found = numbers.divide_by_power(of_rows, wide)
        elif mode.is_tensor:
            found = of_rows / per_row(scale, owners)[:, None]
        elif by_column:
            found = of_rows / per_row(scale.reshape(groups, cols), owners)
        else:
            found = of_rows / scale[:, None]
        grad = grad + only_owned(found, owners, groups)
    return grad.reshape(shape)
