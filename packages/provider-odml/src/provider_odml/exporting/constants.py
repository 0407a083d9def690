"""Constants on their grids, as the file has them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn

from ..capture.graph import Node
from ..decide.decision import ConstantUse, WeightUse
from .composite import Grid
from .fold import Fold

_LEAST_SCALE = 1e-30


def product_constant(
    node: Node, slot: int, values: np.ndarray, use: WeightUse, fold: Fold | None
) -> tuple[np.ndarray, Grid]:
    """Return a contraction's parameter as it is emitted, and its grid.

    That of a matmul is a matrix, of the contracted axes and the others: LiteRT's
    parameters have scales along one axis.
    """
    params = node.params
    if "rows" in params:
        return weight_on_grid(values, use, 0, None)
    if "features" in params:
        return weight_on_grid(values, use, params["features"][1], fold)
    if params["batched"]:
        return weight_on_grid(values, use, None, None)
    inner, free = weight_axes(node, slot, values.ndim)
    size = int(np.prod([values.shape[a] for a in inner]))
    matrix = values.transpose([*inner, *free]).reshape(size, -1)
    return weight_on_grid(matrix, use, 1 if use.channel_axes else None, fold)


def weight_axes(node: Node, slot: int, ndim: int) -> tuple[list[int], list[int]]:
    """Return a parameter's contracted axes, in the operand's order, and the others."""
    contracted = node.params["contracted"]
    inner = [w for _, w in sorted(zip(contracted[1 - slot], contracted[slot], strict=True))]
    return inner, [axis for axis in range(ndim) if axis not in inner]


def weight_on_grid(
    values: np.ndarray, use: WeightUse, axis: int | None, fold: Fold | None
) -> tuple[np.ndarray, Grid]:
    """Return a contraction's parameter, scaled by what follows, and its grid.

    The quantized values are those of training: the parameter's own ranges are scaled with it.
    """
    if not use.channel_axes:
        axis_of_range: tuple[int, ...] = ()
    else:
        axis_of_range = () if axis is None else (axis,)
    alone = WeightUse(use.qtype, axis_of_range, use.method)
    rounded, scale = jax.device_get(_rounded(jnp.asarray(values), alone))
    scale = _live(scale.reshape(-1)) if alone.channel_axes else scale.reshape(())
    slope = None if fold is None or np.all(fold.slope == 1) else fold.slope
    if slope is None:
        return rounded, Grid(use.qtype, scale, None, axis if scale.ndim else None, True)
    axis = int(axis) if axis is not None else rounded.ndim - 1
    if slope.size == 1:
        scale = np.asarray(scale * abs(float(slope.reshape(-1)[0])), np.float32)
        slope = np.full(rounded.shape[axis], slope.reshape(-1)[0])
    else:
        scale = np.asarray(np.broadcast_to(scale, slope.shape) * np.abs(slope), np.float32)
    scale = _live(scale) if scale.ndim else scale
    shape = [1] * rounded.ndim
    shape[axis] = -1
    grid = Grid(use.qtype, scale, None, axis if scale.ndim else None, True)
    scaled = (rounded.astype(np.float64) * slope.reshape(shape)).astype(np.float32)
    return scaled, grid


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
