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
    weight = _weight(row[..., 2], decay)
    return row[..., 0] / weight, row[..., 1] / weight


def _weight(count: jax.Array, decay: float | None) -> jax.Array:
    """Return what sums of so many ranges are divided by, float32."""
    weight = count if decay is None else 1.0 - jnp.float32(decay) ** count
    return jnp.maximum(weight, jnp.float32(1.0 if decay is None else 1.0 - decay))


def terms_of(rows: jax.Array, decay: float | None) -> jax.Array:
    """Return what the average of each row needs when a site asks for it.

    Computed for all sites at once, so that a site has fewer operations.

    Args:
        rows: sums and counts, float32[rows, 3].
        decay: of the moving average.

    Returns:
        float32[rows, 5, 2], for the lower and the upper bound: sum and weight as they are when one
        more range is added, sum and weight without it, and the count.
    """
    rows = lax.stop_gradient(rows)
    sums, count = rows[:, :2], rows[:, 2:]
    after = sums if decay is None else np.float32(decay) * sums
    parts = [after, _weight(count + 1, decay), sums, _weight(count, decay), count]
    return jnp.stack([jnp.broadcast_to(part, sums.shape) for part in parts], 1)


def added(rows: jax.Array, bounds: jax.Array, decay: float | None) -> jax.Array:
    """Return statistics with the ranges of one call.

    Args:
        rows: sums and counts, float32[rows, 3].
        bounds: of each row, float32[rows, 2]; rows that are not finite are left out.
        decay: of the moving average.
    """
    rows, bounds = lax.stop_gradient((rows, bounds))
    keep, add = (1.0, 1.0) if decay is None else (decay, 1.0 - decay)
    sums = np.float32(keep) * rows[:, :2] + np.float32(add) * bounds
    new = jnp.concatenate([sums, rows[:, 2:] + 1], 1)
    return jnp.where(jnp.isfinite(bounds).all(1, keepdims=True), new, rows)


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
    terms: jax.Array,
    how: How,
    observe: bool,
    quantize: bool,
    seen: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Round a tensor to the quantized values of its range.

    The derivative is that of clipping to the range (Bengio et al. 2013, arXiv:1308.3432, and
    section 3 of arXiv:1712.05877).

    Args:
        x: float array of any shape.
        terms: of the statistics of its site before this call, float32[5, 2]: see ``terms_of``.
        how: how it is quantized.
        observe: whether its own range is added to them, before it is rounded.
        quantize: whether it is rounded.
        seen: the bounds that this call has seen at the site already, float32[2]; not finite where
            it has seen none. The tensor's own are joined with them if it is observed.

    Returns:
        The tensor, and the bounds that this call has seen at the site; None if it sees none.
    """
    # For XLA on CPU, whose compile time is a few milliseconds for each kernel, however small. Else
    # it computes what made the tensor again for each of the minimum, the maximum, the rounded
    # values and the mask of the gradient.
    x = lax.optimization_barrier(x)
    if how.fixed is not None:
        bounds = jnp.array(how.fixed, jnp.float32)
        return (_rounded(x, bounds, _grid(bounds, how), how) if quantize else x), seen
    terms, own = lax.stop_gradient(terms), _observed(x, how)
    if observe:
        if seen is not None:
            own = jnp.stack([lax.min(seen[0], own[0]), lax.max(seen[1], own[1])])
        seen = used = own
    else:
        # Where nothing was ever seen, as in the branch of a cond that was not taken, the tensor's
        # own range.
        used = jnp.where(terms[4] == 0, own, jnp.float32(jnp.nan))
        used = used if seen is None else jnp.where(lax.is_finite(seen), seen, used)
    if quantize:
        x = _rounded(x, *lax.optimization_barrier(_on_average(terms, used, how)), how)
    return x, seen


def _on_average(terms: jax.Array, bounds: jax.Array, how: How) -> tuple[jax.Array, jax.Array]:
    """Return the average bounds with those of a tensor, float32[2], and their grid.

    Args:
        terms: of the statistics: see ``terms_of``.
        bounds: of the tensor, float32[2]; left out where they are not finite.
        how: how it is quantized.
    """
    sums, weight, sums_before, weight_before = (terms[i] for i in range(4))
    add = np.float32(1.0 if how.decay is None else 1.0 - how.decay)
    wanted = lax.is_finite(bounds)
    total = lax.select(wanted, sums + (bounds if how.decay is None else add * bounds), sums_before)
    # A division last, which XLA does not compute again for each operation that reads it.
    average = total / lax.select(wanted, weight, weight_before)
    return average, _grid(lax.optimization_barrier(average), how)


def _grid(bounds: jax.Array, how: How) -> jax.Array:
    """Return what rounding to a range reads, float32[4].

    The scale, its reciprocal, and the least and the greatest number of steps from 0: as
    ``qn.scale_of`` finds them, in the fewest operations.
    """
    kind = qn.get_qtype(how.qtype)
    lower, upper = bounds[:1], bounds[1:]
    one, tiny = np.ones(1, np.float32), np.full(1, jnp.finfo(jnp.float32).tiny, np.float32)
    if how.symmetric:
        scale = lax.max(upper / np.full(1, kind.qmax, np.float32), tiny)
        least, most = (np.full(1, sign * kind.qmax, np.float32) for sign in (-1, 1))
    else:
        assert kind.asymmetric is not None
        low, high = (np.full(1, end, np.float32) for end in kind.asymmetric)
        if how.method != "minmax":  # whose ranges hold 0
            lower, upper = lax.min(lower, 0 * one), lax.max(upper, 0 * one)
        # The difference itself could overflow.
        scale = lax.max(upper / (high - low) - lower / (high - low), tiny)
        point = lax.round(low - lower / scale, lax.RoundingMethod.TO_NEAREST_EVEN)
        point = lax.clamp(low, point, high)
        least, most = low - point, high - point
    return lax.concatenate([scale, one / scale, least, most], 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _rounded(x: jax.Array, bounds: jax.Array, grid: jax.Array, how: How) -> jax.Array:
    """``qn.dequantize(qn.quantize_with(x, ...))`` without the integers between; NaN stays NaN."""
    scale, reciprocal, least, most = (lax.reshape(grid[i : i + 1], ()) for i in range(4))
    steps = lax.round(x.astype(jnp.float32) * reciprocal, lax.RoundingMethod.TO_NEAREST_EVEN)
    return (lax.clamp(least, steps, most) * scale).astype(x.dtype)


@_rounded.defjvp
def _rounded_jvp(how: How, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, bounds, grid), tangent = primals, tangents[0]
    lower, upper = (lax.reshape(bounds[i : i + 1], ()).astype(x.dtype) for i in range(2))
    inside = lax.eq(lax.clamp(lower, x, upper), x)
    return _rounded(x, bounds, grid, how), lax.select(inside, tangent, lax.full_like(tangent, 0))


@functools.partial(jax.jit, static_argnums=(1,))
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
