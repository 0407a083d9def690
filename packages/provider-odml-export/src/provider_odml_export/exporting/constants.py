"""Constants on their grids, as the file has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_odml.features import ConstantUse, Node, WeightUse, matrix_axes, quantized_blocks

from .composite import Grid

_LEAST_SCALE = 1e-30
_MOST_STEPS_OF_BIAS = 2.0**30


@dataclass(frozen=True)
class Fold:
    """What follows a contraction of a parameter and is folded into it: ``slope * y + offset``.

    Attributes:
        slope: one per channel, float64.
        offset: one per channel, float64.
    """

    slope: np.ndarray
    offset: np.ndarray


def product_constant(
    node: Node,
    slot: int,
    values: np.ndarray,
    use: WeightUse,
    fold: Fold | None,
    input_scale: float | None,
) -> tuple[np.ndarray, Grid]:
    """Return a contraction's parameter as it is emitted, and its grid.

    That of a matmul is a matrix, of the contracted axes and the others: LiteRT's
    parameters have scales along one axis.

    Args:
        node: the contraction.
        slot: which operand the parameter is.
        values: the parameter.
        use: how it is quantized.
        fold: what follows and is folded into it.
        input_scale: the scale of the other operand; None where the device finds it, or floats.
    """
    params = node.params
    if use.tile_size is not None:
        return _in_blocks(values, use, "rows" in params)
    if "rows" in params:
        return weight_on_grid(values, use, 0)
    if "features" in params:
        return weight_on_grid(values, use, params["features"][1], fold, input_scale)
    if params["batched"]:
        return weight_on_grid(values, use, None)
    inner, free = matrix_axes(params, slot, values.ndim)
    size = int(np.prod([values.shape[a] for a in inner]))
    matrix = values.transpose([*inner, *free]).reshape(size, -1)
    return weight_on_grid(matrix, use, 1 if use.channel_axes else None, fold, input_scale)


def _in_blocks(values: np.ndarray, use: WeightUse, is_table: bool) -> tuple[np.ndarray, Grid]:
    """Return a parameter in blocks as a matrix, and its grid: those of training.

    Rows of a table stay rows; a matmul's parameter is of the contracted axes and the others.
    """
    codes, scale, _ = jax.device_get(jax.jit(quantized_blocks, static_argnums=1)(values, use))
    size = codes.shape[0] * codes.shape[1]
    matrix, scales = (codes * scale).reshape(size, -1), scale.reshape(len(scale), -1)
    if is_table:
        matrix, scales = matrix.T, scales.T
    axis = 0 if is_table else 1
    grid = Grid(use.qtype, np.ascontiguousarray(scales), None, axis, True, int(use.tile_size or 0))
    return np.ascontiguousarray(matrix), grid


def weight_on_grid(
    values: np.ndarray,
    use: WeightUse,
    axis: int | None,
    fold: Fold | None = None,
    input_scale: float | None = None,
) -> tuple[np.ndarray, Grid]:
    """Return a contraction's parameter, scaled by what follows, and its grid.

    The quantized values are those of training: the parameter's own ranges are scaled with it. See
    ``_fine_enough`` for channels whose bias is far greater than their products.
    """
    if not use.channel_axes:
        axis_of_range: tuple[int, ...] = ()
    else:
        axis_of_range = () if axis is None else (axis,)
    alone = WeightUse(use.qtype, axis_of_range, use.method)
    rounded, scale = jax.device_get(_rounded(jnp.asarray(values), alone))
    scale = scale.reshape(-1) if alone.channel_axes else scale.reshape(())
    last = int(axis) if axis is not None else rounded.ndim - 1
    shape = [1] * rounded.ndim
    shape[last] = -1
    slope = None if fold is None or np.all(fold.slope == 1) else fold.slope
    if slope is not None and slope.size == 1:
        scale = np.asarray(scale * abs(float(slope.reshape(-1)[0])), np.float32)
    elif slope is not None:
        scale = np.asarray(np.broadcast_to(scale, slope.shape) * np.abs(slope), np.float32)
    if slope is not None:
        rounded = (rounded.astype(np.float64) * slope.reshape(shape)).astype(np.float32)
    if fold is not None and input_scale is not None:
        rounded, scale = _fine_enough(rounded, scale, np.abs(fold.offset) / input_scale, shape)
    scale = _live(scale) if scale.ndim else scale
    return rounded, Grid(use.qtype, scale, None, last if scale.ndim else None, True)


def _fine_enough(
    values: np.ndarray, scale: np.ndarray, bias: np.ndarray, shape: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return a parameter with scales that leave room for the bias in the int32 accumulator.

    The device adds the bias in steps of the input's scale times the channel's. A channel whose
    weights are almost zero, as a folded BatchNorm makes them, has steps so small that its bias
    does not fit. With half of the int32 for the bias, the other half holds the products of 33,000
    int8 weights.

    Training rounds to the finer scale, and computes the same: a weight moves by half of its new
    scale at most, and an output of n products by n * 255 * bias / 2**31. That is 0.03 steps for
    1,000 products, since a step of the output is at least the bias over 255.

    Args:
        values: the parameter on its grid.
        scale: of the channels, or one.
        bias: its magnitude over the scale of the input, by channel, or one.
        shape: of something with a value per channel, to be broadcast to the parameter.
    """
    least = bias.reshape(-1) / _MOST_STEPS_OF_BIAS
    least = np.broadcast_to(least, scale.shape) if scale.ndim else least.max(initial=0.0)
    coarse = scale < least
    if not np.any(coarse):
        return values, scale
    scale = np.where(coarse, least, scale).astype(np.float32)
    # A channel of zeros that stays as it is has the scale 0.
    steps = np.where(coarse, scale, np.float32(1))
    steps = steps.reshape(shape) if scale.ndim else steps
    on_grid = (np.round(values.astype(np.float64) / steps) * steps).astype(np.float32)
    coarse = coarse.reshape(shape) if scale.ndim else coarse
    return np.where(coarse, on_grid, values), scale


@functools.partial(jax.jit, static_argnums=(1,))
def _rounded(values: jax.Array, use: WeightUse) -> tuple[jax.Array, jax.Array]:
    """Return values on the grid of training, and its scales."""
    found = qn.quantize(values, use.qtype, channel_axes=use.channel_axes, method=use.method)
    return qn.dequantize(found), found.scale


def _live(scale: np.ndarray) -> np.ndarray:
    """Return scales, with an ordinary one for channels of zeros.

    The converter crashes at a scale of 0, and the scale of a bias follows from it.
    """
    dead = scale < _LEAST_SCALE
    ordinary = scale.max(initial=0.0) if not dead.all() else np.float32(1)
    return np.where(dead, ordinary, scale).astype(np.float32)


def constant_grid(values: np.ndarray, use: ConstantUse) -> Grid:
    """Return the grid of a constant's own range."""
    values = np.asarray(values, np.float32)
    lower = np.float32(min(float(values.min(initial=0)), 0))
    upper = np.float32(max(float(values.max(initial=0)), 0))
    if lower == upper == 0:
        upper = np.float32(1)
    if use.qtype == "int16":
        return Grid.of(qn.Calibration(None, jnp.float32(max(-lower, upper))), "int16")
    return Grid.of(qn.Calibration(jnp.float32(lower), jnp.float32(upper)), use.qtype)
