"""Ranges of tensors, and fake quantization to them.

What is done at one site is one jitted function, so that a model of many sites traces it once for
each shape.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn

from ..decide.decision import ConstantUse, DynamicUse, Site, WeightUse


@dataclass(frozen=True)
class How:
    """How a tensor is quantized.

    Attributes:
        qtype: "int8" or "int16".
        method: the calibration method.
        batch_axes: axes of which the mean of the ranges is taken.
        symmetric: whether the range is symmetric.
        decay: of the moving average; None for the mean.
        fixed: the range, where it is given.
    """

    qtype: str
    method: str
    batch_axes: tuple[int, ...]
    symmetric: bool
    decay: float | None
    fixed: tuple[float, float] | None

    @classmethod
    def of(cls, site: Site, symmetric: bool, decay: float | None, batch: tuple[int, ...]) -> How:
        """Return how a site's tensor is quantized."""
        symmetric = symmetric or site.is_symmetric
        axes = batch if site.batch_axes is None else site.batch_axes
        return cls(site.qtype, site.method, axes, symmetric, decay, site.fixed)


def calibration_of(row: jax.Array, decay: float | None, symmetric: bool) -> qn.Calibration:
    """Return the average of rows of statistics."""
    lower, upper = _average(row, decay)
    return qn.Calibration(None if symmetric else lower, upper)


def _average(row: jax.Array, decay: float | None) -> tuple[jax.Array, jax.Array]:
    """Return the average bounds, float32."""
    total_lower, total_upper, count = (row[..., i] for i in range(3))
    weight = count if decay is None else 1.0 - jnp.float32(decay) ** count
    weight = jnp.maximum(weight, jnp.float32(1.0 if decay is None else 1.0 - decay))
    return total_lower / weight, total_upper / weight


def joined_row(rows: jax.Array, decay: float | None) -> jax.Array:
    """Return a row whose range holds those of all seen rows.

    Args:
        rows: float32[..., 3].
        decay: of the moving average.
    """
    rows = rows.reshape(-1, 3)
    seen = rows[:, 2] > 0
    lower, upper = _average(rows, decay)
    lower = jnp.min(jnp.where(seen, lower, jnp.inf))
    upper = jnp.max(jnp.where(seen, upper, -jnp.inf))
    weight = np.float32(1.0 if decay is None else 1.0 - decay)
    one = jnp.stack([lower * weight, upper * weight, jnp.float32(1)])
    return jnp.where(seen.any(), one, jnp.float32(0))


def _observed(x: jax.Array, how: How) -> jax.Array:
    """Return the bounds of a tensor, float32[2].

    The mean over the batch axes of the extremes over the others. Under ``vmap`` the mapped axis
    is a batch axis too, and the range one for all of it.
    """
    batch = tuple(sorted({a % x.ndim for a in how.batch_axes if -x.ndim <= a < x.ndim}))
    return _bounds(lax.stop_gradient(x), how, batch)


def _bounds(x: jax.Array, how: How, batch: tuple[int, ...]) -> jax.Array:
    @jax.custom_batching.custom_vmap
    def find(x: jax.Array) -> jax.Array:
        lower, upper = _extremes(x, how, batch)
        if how.symmetric:
            upper = jnp.maximum(-lower, upper)
            lower = -upper
        return _mean(lax.concatenate([lower.reshape(1, -1), upper.reshape(1, -1)], 0))

    @find.def_vmap
    def rule(size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        del size, batched  # it is called where the one argument is batched
        return _bounds(x, how, (0, *(axis + 1 for axis in batch))), False

    return find(x)


def _extremes(x: jax.Array, how: How, batch: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the bounds of each index of the batch axes, float32."""
    if how.method == "minmax":
        # As quant_numerics.calibrate, with 0 in each range, in fewer operations: they
        # are what XLA's time to compile is made of.
        axes = tuple(axis for axis in range(x.ndim) if axis not in batch)
        zero = np.zeros((), x.dtype)
        # Not as the initial value of the reductions: XLA leaves that out where a size is 1.
        lower = lax.min(lax.reduce_min(x, axes), zero)
        upper = lax.max(lax.reduce_max(x, axes), zero)
        return lower.astype(jnp.float32), upper.astype(jnp.float32)
    calibration = qn.calibrate(x, how.qtype, channel_axes=batch, method=how.method)
    upper = calibration.upper.astype(jnp.float32)
    lower = -upper if calibration.lower is None else calibration.lower.astype(jnp.float32)
    return lower, upper


def _mean(x: jax.Array) -> jax.Array:
    """Return the means of the rows of a matrix."""
    return lax.reduce_sum(x * np.float32(1 / x.shape[1]), (1,))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def at_site(
    x: jax.Array,
    row: jax.Array,
    how: How,
    update: bool,
    quantize: bool,
    before: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Round a tensor to the quantized values of its range.

    The derivative is that of clipping to the range (Bengio et al. 2013, arXiv:1308.3432, and
    section 3 of arXiv:1712.05877).

    Args:
        x: float array of any shape.
        row: the statistics of its site, float32[3].
        how: how it is quantized.
        update: whether its own range is added to them, before it is rounded.
        quantize: whether it is rounded.
        before: the bounds that this call has seen at the site already, float32[2]: its own range
            is joined with those, and ``row`` is what the statistics were before the call.

    Returns:
        The tensor, the statistics, and the bounds seen so far.
    """
    # The barriers are for XLA on CPU, whose compile time is a few milliseconds for each kernel,
    # however small. This one: else it computes what made the tensor again for each of the minimum,
    # the maximum, the rounded values and the mask of the gradient.
    x = lax.optimization_barrier(x)
    if how.fixed is not None:
        lower, upper = map(jnp.float32, how.fixed)
        return (_rounded(x, _grid(lower, upper, how), how) if quantize else x), row, before
    row = lax.stop_gradient(row)
    bounds = _observed(x, how)
    if before is not None:
        bounds = jnp.stack([lax.min(before[0], bounds[0]), lax.max(before[1], bounds[1])])
    seen = lax.pad(bounds, jnp.float32(1.0), [(0, 1, 0)])
    if how.decay is None:
        added = row + seen
    else:
        keep, add = how.decay, 1.0 - how.decay
        keeps, adds = np.array([[keep, keep, 1.0], [add, add, 1.0]], np.float32)
        added = keeps * row + adds * seen
    # The bounds have opposite signs, so that their sum is finite where both are.
    wanted = lax.is_finite(bounds[:1] + bounds[1:])
    if not update:
        # Where nothing was ever seen, as in the branch of a cond that was not taken, the tensor's
        # own range.
        wanted &= row[2:] == 0
    new = lax.select(lax.broadcast_in_dim(wanted, (3,), (0,)), added, row)
    # Two kernels for the numbers of a site: all that others read is in one of two vectors.
    new = lax.optimization_barrier(new)
    if quantize:
        lower, upper = _average(new, how.decay)
        x = _rounded(x, lax.optimization_barrier(_grid(lower, upper, how)), how)
    return x, new if update else row, None if before is None else bounds


def _grid(lower: jax.Array, upper: jax.Array, how: How) -> jax.Array:
    """Return what rounding to a range reads, float32[6].

    Its bounds, the scale, its reciprocal, and the least and the greatest number of steps from 0.
    """
    calibration = qn.Calibration(None if how.symmetric else lower, upper)
    scale, zero_point, _ = qn.scale_of(calibration, how.qtype)
    kind = qn.get_qtype(how.qtype)
    if zero_point is None:
        least, most = jnp.float32(-kind.qmax), jnp.float32(kind.qmax)
    else:
        assert kind.asymmetric is not None
        low, high = kind.asymmetric
        point = lax.convert_element_type(zero_point, jnp.float32)
        least, most = np.float32(low) - point, np.float32(high) - point
    parts = [lower, upper, scale, np.float32(1) / scale, least, most]
    return lax.concatenate([lax.reshape(part, (1,)) for part in parts], 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _rounded(x: jax.Array, grid: jax.Array, how: How) -> jax.Array:
    """``qn.dequantize(qn.quantize_with(x, ...))`` without the integers between; NaN stays NaN."""
    scale, reciprocal, least, most = (lax.reshape(grid[i : i + 1], ()) for i in range(2, 6))
    steps = lax.round(x.astype(jnp.float32) * reciprocal, lax.RoundingMethod.TO_NEAREST_EVEN)
    return (lax.clamp(least, steps, most) * scale).astype(x.dtype)


@_rounded.defjvp
def _rounded_jvp(how: How, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, grid), tangent = primals, tangents[0]
    lower, upper = grid[:2].astype(x.dtype)
    inside = (x >= lower) & (x <= upper)
    return _rounded(x, grid, how), lax.select(inside, tangent, lax.full_like(tangent, 0))


@functools.partial(jax.jit, static_argnums=(1,))
def fake_quant_weight(x: jax.Array, use: WeightUse) -> jax.Array:
    """Round a parameter to the ranges of its channels, straight through."""
    return qn.fake_quant(x, use.qtype, channel_axes=use.channel_axes, method=use.method)


@functools.partial(jax.jit, static_argnums=(1,))
def fake_quant_constant(x: jax.Array, use: ConstantUse) -> jax.Array:
    """Round a constant to its range, straight through."""
    method = "minmax" if use.qtype == "int8" else "absmax"
    return qn.fake_quant(x, use.qtype, method=method)


@functools.partial(jax.jit, static_argnums=(1,))
def fake_quant_dynamic(x: jax.Array, use: DynamicUse) -> jax.Array:
    """Round each row of an activation to its range, straight through.

    With a zero point for each row, as LiteRT's XNNPACK kernels (``qd8``) do.
    """
    return qn.fake_quant(x, "int8", channel_axes=use.channel_axes, method="minmax")
