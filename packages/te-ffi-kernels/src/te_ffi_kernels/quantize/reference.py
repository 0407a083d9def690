"""Quantization and back in plain JAX."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..groups import as_matrices, only_owned, owner, per_row
from . import numbers
from .config import DequantizeConfig, QuantizeConfig
from .modes import BLOCK, turn


def dequantized(config: DequantizeConfig, x: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Return the numbers of quantized values, for checked arguments."""
    found = numbers.decode(x, scale_inv, config.mode, config.axis, by_column=config.by_column)
    return found.astype(config.dtype)


@jax.custom_jvp
def straight(x: jax.Array, quantized: jax.Array) -> jax.Array:
    """Return the second, with the derivative of the first."""
    del x
    return quantized


@straight.defjvp
def _straight_jvp(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


def quantized(
    config: QuantizeConfig, x: jax.Array, scale: jax.Array, amax: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the results for checked arguments; those that aren't wanted are zeros."""
    results = config.results(x)
    mode, axis = config.scaling_mode, config.axis
    matrix = _matrix(x, axis)
    found: dict[int, jax.Array] = {}
    if mode.is_tensor:
        qvalue = numbers.encode(matrix * scale.reshape(()), config.out_dtype).reshape(x.shape)
        inverse = 1 / scale.reshape(1)
        found |= {0: qvalue, 1: turn(qvalue, axis), 2: inverse, 3: inverse}
        most = numbers.of_bits(numbers.absmax_bits(matrix)).reshape(1)
        before = amax.reshape(1)
        found[4] = jnp.where(before >= most, before, most)
    else:
        make = _blocks if mode.is_mx else _channels
        found[0], found[2] = make(config, matrix, by_column=False)
        if config.q_layout.has_colwise:
            found[1], found[3] = make(config, matrix, by_column=True)
            if not mode.is_mx:
                found[1] = found[1].T
        found[4] = amax.reshape(1)
    if config.is_dbias:
        found[5] = matrix.sum(0).astype(x.dtype)
    wanted = (config.q_layout.has_rowwise, config.q_layout.has_colwise) * 2
    wanted += (True, config.is_dbias)
    return tuple(
        _shaped(found[i], result) if wanted[i] else _nothing(result)
        for i, result in enumerate(results)
    )


def _matrix(x: jax.Array, axis: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _channels(
    config: QuantizeConfig, matrix: jax.Array, *, by_column: bool
) -> tuple[jax.Array, jax.Array]:
    bits = numbers.absmax_bits(matrix, axis=0 if by_column else 1)
    scales = numbers.channel_scale(bits, config.out_dtype)
    ratio = matrix * (scales[None] if by_column else scales[:, None])
    return numbers.encode(ratio, config.out_dtype), 1 / scales


def _blocks(
    config: QuantizeConfig, matrix: jax.Array, *, by_column: bool
) -> tuple[jax.Array, jax.Array]:
    if not by_column and not config.q_layout.has_rowwise:
        return matrix, matrix
    rows, cols = matrix.shape
    if by_column:
        blocks, over = matrix.reshape(rows // BLOCK, BLOCK, cols), 1
    else:
        blocks, over = matrix.reshape(rows, cols // BLOCK, BLOCK), 2
    scales = numbers.block_scale(numbers.absmax_bits(blocks, axis=over), config.out_dtype)
    ratio = numbers.divide_by_power(blocks, jnp.expand_dims(scales, over))
    return numbers.encode(ratio, config.out_dtype).reshape(rows, cols), scales


def _shaped(x: jax.Array, result: jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype == jnp.uint8 and result.dtype != jnp.uint8:
        x = lax.bitcast_convert_type(x, result.dtype)
    return x.reshape(result.shape)


def _nothing(result: jax.ShapeDtypeStruct) -> jax.Array:
    raw = jnp.zeros(result.shape, jnp.uint8)
    if result.dtype.itemsize > 1:
        return raw.astype(result.dtype)
    return _shaped(raw, result) if result.dtype != jnp.int8 else raw.astype(jnp.int8)


def grouped(
    config: QuantizeConfig, x: jax.Array, scale: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the results for checked arguments."""
    groups = group_sizes.shape[0]
    results = config.grouped_results(x, groups)
    mode, layout = config.scaling_mode, config.q_layout
    sizes = group_sizes * math.prod(x.shape[1 : config.axis])
    owners = owner(sizes, math.prod(x.shape[: config.axis]))
    matrix = only_owned(_matrix(x, config.axis), owners, groups)
    most = jnp.zeros(groups, jnp.float32)
    found: list[jax.Array | None] = [None] * 4
    if mode.is_tensor:
        qvalue = numbers.encode(matrix * per_row(scale, owners)[:, None], config.out_dtype)
        found = [qvalue, _turned_groups(qvalue, sizes), 1 / scale, 1 / scale]
        bits = numbers.absmax_bits(matrix, axis=1)
        bits = jnp.zeros(groups, jnp.int32).at[owners].max(bits, mode="drop")
        most = numbers.of_bits(bits)
    elif mode.is_mx:
        found[0], found[2] = _blocks(config, matrix, by_column=False)
        if layout.has_colwise:
            found[1], found[3] = _blocks(config, matrix, by_column=True)
    else:
        found[0], inverses = _channels(config, matrix, by_column=False)
        found[2] = only_owned(inverses, owners, groups)
        bits = jnp.zeros((groups, matrix.shape[1]), jnp.int32)
        bits = bits.at[owners].max(numbers.magnitudes(matrix), mode="drop")
        scales = numbers.channel_scale(bits, config.out_dtype)
        qvalue = numbers.encode(matrix * per_row(scales, owners), config.out_dtype)
        found[1], found[3] = _turned_groups(qvalue, sizes), 1 / scales
    return (
        *(
            _shaped(array, result) if wanted and array is not None else _nothing(result)
            for array, result, wanted in zip(
                found, results, (layout.has_rowwise, layout.has_colwise) * 2, strict=False
            )
        ),
        most,
    )


def _turned_groups(qvalue: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the transposed matrices of groups as one vector."""
    raw = lax.bitcast_convert_type(qvalue, jnp.uint8)
    return lax.bitcast_convert_type(as_matrices(raw, sizes), qvalue.dtype)
