"""Ranges: those whose scales give the least error of the results, by search."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn

from .layout import Layout
from .state import RANGE, Pass, Weight

_LEAST_FACTOR = 0.4
"""The smallest share of a range that is tried, before its scale is fitted."""


@dataclasses.dataclass(frozen=True)
class Ranges(Pass):
    """Search scales and zero points for the least error of what is multiplied, not of weights.

    llama.cpp searches the scales and minima of its k-quants with each weight's error counted by the
    mean square of its activation (the importance matrix). Here errors count by the whole Gram
    matrix of a scale's channels, so that errors which cancel each other in the results cost
    nothing. Each range that is tried is fitted once: for given quantized values, the best scale has
    a closed form (least squares). It replaces the range of the rule's calibration method. Put it
    behind the passes that transform channels, and before ``Gptq``.

    Attributes:
        steps: how many fractions of a symmetric range are tried, from 1 down to 0.4; of a range
            with zero points, the square root of it for either end.
        fits: how often a range is fitted to its quantized values, which then are rounded again.
        diagonal: whether errors count by the mean square of their channel alone, as in llama.cpp.

    Raises:
        ValueError: a number is out of range.
    """

    steps: int = 36
    fits: int = 2
    diagonal: bool = False

    stage = RANGE

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"Ranges.steps must be 1 or more. Got {self.steps!r}.")
        if self.fits < 0:
            raise ValueError(f"Ranges.fits must be 0 or more. Got {self.fits!r}.")

    def run(self, weight: Weight) -> str | None:
        """Run it: see ``Pass.run``."""
        if qn.parse_calibration_method(weight.plan.method).is_symmetric:
            ends = np.linspace(1.0, _LEAST_FACTOR, self.steps)
            factors = list(zip(ends, ends, strict=True))
        else:
            ends = np.linspace(1.0, _LEAST_FACTOR, math.ceil(math.sqrt(self.steps)))
            factors = list(itertools.product(ends, ends))
        return search(weight, factors, self.fits, self.diagonal)


def search(
    weight: Weight,
    factors: Sequence[tuple[float, float]],
    fits: int = 0,
    diagonal: bool = False,
) -> str | None:
    """Set the ranges with the least error, each scale's alone; return why not, or None.

    Args:
        weight: the parameter; changed in place.
        factors: what both ends of the calibrated ranges are multiplied by, the lower one first.
        fits: how often each is fitted to its quantized values by least squares.
        diagonal: whether errors count by the mean squares of channels alone.
    """
    plan, layout = weight.plan, weight.layout
    tile = _tile(weight)
    if tile is None or qn.get_qtype(plan.qtype).two_level:
        return "its ranges are the rule's: scales are not of one output each, or scaled themselves"
    mask = weight.mask()
    w = weight.w if mask is None else jnp.where(mask, weight.w, 0)
    whole = qn.calibrate(
        layout.array(w),
        plan.qtype,
        channel_axes=plan.granularity.channel_axes,
        tile_axes=dict(plan.granularity.tile_axes),
        method=plan.method,
    )
    form = _Form(layout, plan.qtype, plan.scale_dtype, tuple(plan.granularity.tile_axes.items()))
    pairs = jnp.asarray(factors, jnp.float32)
    weight.ranges = _searched(form, fits, diagonal, tile, weight.w, w, weight.gram, whole, pairs)
    return None


class _Form(NamedTuple):
    """How the parameter is quantized."""

    layout: Layout
    qtype: str
    scale_dtype: Any
    tile_axes: tuple[tuple[int, int], ...]


class _Found(NamedTuple):
    """The best range of each scale so far, [S, ceil(K / tile), N].

    Attributes:
        error: its squared error.
        low: what the lower end of the whole range is multiplied by.
        high: the same for the upper end.
    """

    error: jax.Array
    low: jax.Array
    high: jax.Array


# One program for all that is tried: each alone would be dozens of small ones.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _searched(
    form: _Form,
    fits: int,
    diagonal: bool,
    tile: int,
    w: jax.Array,
    masked: jax.Array,
    gram: jax.Array,
    whole: qn.Calibration,
    factors: jax.Array,
) -> qn.Calibration:
    """Return the best ranges.

    Args:
        form: how the parameter is quantized.
        fits: how often a range is fitted.
        diagonal: whether errors count by the mean squares of channels alone.
        tile: channels that share a scale.
        w: the parameter, [S, K, N].
        masked: the same with the zeros that stay zeros.
        gram: of its activations, [S, K, K].
        whole: the ranges that are multiplied.
        factors: float32 [count, 2].
    """
    layout, own = form.layout, _blocks(gram, tile)
    if diagonal:
        own = own * jnp.eye(tile)
    array = layout.array(masked)
    one = jnp.ones((w.shape[0], -(-w.shape[1] // tile), w.shape[2]))

    def ranges(low: jax.Array, high: jax.Array) -> qn.Calibration:
        low, high = (_in_scales(x, layout, whole.upper.shape) for x in (low, high))
        lower = None if whole.lower is None else whole.lower * low
        return qn.Calibration(lower, whole.upper * high)

    def tried(best: _Found, factor: jax.Array) -> tuple[_Found, None]:
        low, high = one * factor[0], one * factor[1]
        for _ in range(fits + 1):
            scales = qn.scale_of(ranges(low, high), form.qtype, form.scale_dtype)
            q = qn.quantize_with(array, form.qtype, *scales, tile_axes=dict(form.tile_axes))
            back = layout.matrices(qn.dequantize(q))
            best, fit = _compared(best, low, high, w, back, own)
            low, high = low * fit, high * fit
        return best, None

    best, _ = lax.scan(tried, _Found(jnp.full(one.shape, jnp.inf), one, one), factors)
    return ranges(best.low, best.high)


def _compared(
    best: _Found, low: jax.Array, high: jax.Array, w: jax.Array, back: jax.Array, own: jax.Array
) -> tuple[_Found, jax.Array]:
    """Return the better range of each scale, and what the best scale is a multiple of this by."""
    e = w - back
    weighted = _times(own, back)
    error = _sums(own, e, _times(own, e))
    better = error < best.error
    # With its quantized values as they are, the scale of the least error is that of least squares.
    fit = _sums(own, w, weighted) / jnp.maximum(_sums(own, back, weighted), 1e-30)
    pairs = zip((error, low, high), best, strict=True)
    found = _Found(*(jnp.where(better, new, old) for new, old in pairs))
    # Of a scale whose values are all 0, and of one that would turn signs, nothing is changed.
    return found, jnp.where(jnp.isfinite(fit) & (fit > 0.5) & (fit < 2), fit, 1.0)


def _tiled(x: jax.Array, tile: int) -> jax.Array:
    """Return [S, K, N] as [S, ceil(K / tile), tile, N]; zeros fill a shorter last tile."""
    steps, k, n = x.shape
    return jnp.pad(x, ((0, 0), (0, -k % tile), (0, 0))).reshape(steps, -1, tile, n)


def _times(own: jax.Array, x: jax.Array) -> jax.Array:
    """Return each tile's Gram matrix times [S, K, N], tiled."""
    return jnp.matmul(own, _tiled(x, own.shape[-1]), precision="highest")


def _sums(own: jax.Array, x: jax.Array, weighted: jax.Array) -> jax.Array:
    """Return the sum over each tile of x times ``weighted``, [S, ceil(K / tile), N]."""
    return jnp.sum(_tiled(x, own.shape[-1]) * weighted, axis=2)


@functools.partial(jax.jit, static_argnums=1)
def _blocks(gram: jax.Array, tile: int) -> jax.Array:
    """Return the Gram matrix of each tile's channels, [S, ceil(K / tile), tile, tile]."""
    steps, k, _ = gram.shape
    missing = -k % tile
    gram = jnp.pad(gram, ((0, 0), (0, missing), (0, missing)))
    tiles = gram.shape[1] // tile
    blocks = gram.reshape(steps, tiles, tile, tiles, tile)
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1)


def _tile(weight: Weight) -> int | None:
    """Return the channels that share scales per output; None if outputs share."""
    granularity, layout = weight.plan.granularity, weight.layout
    others = [a for a in range(len(layout.shape)) if a not in layout.k_axes]
    if any(layout.shape[a] > 1 and a not in granularity.channel_axes for a in others):
        return None
    tiles, *outer = [granularity.tile_axes.get(a, 0) for a in reversed(layout.k_axes)]
    if any(outer) or set(granularity.channel_axes) & set(layout.k_axes):
        return None
    if tiles and any(layout.shape[a] > 1 for a in layout.k_axes[:-1]):
        return None
    return tiles or layout.k


def _in_scales(factors: jax.Array, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """Return [S, ceil(K / tile), N] in the shape of the scales."""
    moved = [shape[axis] for axis in layout.order]
    assert math.prod(moved) == factors.size
    return factors.reshape(moved).transpose(
        [layout.order.index(axis) for axis in range(len(shape))]
    )
