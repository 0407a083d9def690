"""AWQ: channels that matter are scaled up before they are rounded."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

import quant_numerics as qn

from .base import TRANSFORM, Pass
from .layout import Layout
from .state import Weight, difference, output_squares
from .transformed import Scaled

_LEAST_FACTOR = 0.5
"""The smallest share of a range that clipping leaves, as in the authors' search."""


@dataclasses.dataclass(frozen=True)
class Awq(Pass):
    """Scale channels by ``size(x[:, k]) ** a``, the best of a grid.

    Lin et al. 2023, arXiv:2306.00978, section 3.2: the grid is 0, 1/grid, ... below 1. ``size`` is
    the root of the mean square, which the Gram matrix has; the paper takes the mean magnitude. The
    error is that of the contraction, computed from the Gram matrix. Then ranges are clipped, as in
    the authors' code: each scale takes the fraction of its range that gives the least error.

    Attributes:
        grid: how many exponents are tried; 1 scales nothing.
        clip: how many fractions are tried, from 1 down to a half; 1 clips nothing.

    Raises:
        ValueError: a number is below 1.
    """

    grid: int = 20
    clip: int = 11

    stage = TRANSFORM

    def __post_init__(self):
        for field in ("grid", "clip"):
            if getattr(self, field) < 1:
                raise ValueError(f"Awq.{field} must be 1 or more. Got {getattr(self, field)!r}.")

    def run(self, weight: Weight) -> str | None:
        """Run it: see ``Pass.run``."""
        squares = jnp.diagonal(weight.gram, axis1=-2, axis2=-1)
        if self.grid > 1:
            weight.transform(Scaled(self._scales(weight, squares)))
        return self._clip(weight) if self.clip > 1 else None

    def _scales(self, weight: Weight, squares: jax.Array) -> jax.Array:
        """Return the scales [S, K] of the least error, by step."""
        best = jnp.ones_like(squares)
        least = jnp.full(squares.shape[:1], jnp.inf)
        for i in range(self.grid):
            scale = _normal(squares, i / self.grid)
            q = weight.rounded(weight.w * scale[..., None])
            back = weight.layout.matrices(qn.dequantize(q)) / scale[..., None]
            errors = output_squares(weight.w - back, weight.gram)
            better = errors < least
            best = jnp.where(better[:, None], scale, best)
            least = jnp.where(better, errors, least)
        return best

    def _clip(self, weight: Weight) -> str | None:
        plan, layout = weight.plan, weight.layout
        tile = _tile(weight)
        if tile is None or qn.get_qtype(plan.qtype).two_level:
            return "not clipped: its scales are not of one output each, or scaled themselves"
        mask = weight.mask()
        w = weight.w if mask is None else jnp.where(mask, weight.w, 0)
        whole = qn.calibrate(
            layout.array(w),
            plan.qtype,
            channel_axes=plan.granularity.channel_axes,
            tile_axes=dict(plan.granularity.tile_axes),
            method=plan.method,
        )
        steps, k, n = weight.w.shape
        factors = jnp.ones((steps, -(-k // tile), n))
        least = jnp.full(factors.shape, jnp.inf)
        for factor in jnp.linspace(1.0, _LEAST_FACTOR, self.clip):
            weight.ranges = jax.tree.map(lambda bound, f=factor: bound * f, whole)
            e = difference(weight.w, weight.rounded(), layout)
            errors = _tile_squares(e, weight.gram, tile)
            factors = jnp.where(errors < least, factor, factors)
            least = jnp.minimum(errors, least)
        best = _in_scales(factors, layout, whole.upper.shape)
        weight.ranges = jax.tree.map(lambda bound: bound * best, whole)
        return None


@functools.partial(jax.jit, static_argnums=1)
def _normal(squares: jax.Array, exponent: float) -> jax.Array:
    """Return an exponent's scales, normalized: largest times least is 1."""
    # Half the exponent, since these are squares. A channel that was always 0 is not scaled.
    scale = jnp.where(squares > 0, squares, 1.0) ** (exponent / 2)
    ends = scale.max(-1, keepdims=True), scale.min(-1, keepdims=True)
    return scale / jnp.sqrt(ends[0]) / jnp.sqrt(ends[1])


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


@functools.partial(jax.jit, static_argnums=2)
def _tile_squares(e: jax.Array, gram: jax.Array, tile: int) -> jax.Array:
    """Return the squared error of each tile alone, [S, ceil(K / tile), N]."""
    steps, k, n = e.shape
    # Zeros fill a shorter last tile, and make no error.
    tiles, missing = -(-k // tile), -k % tile
    e = jnp.pad(e, ((0, 0), (0, missing), (0, 0))).reshape(steps, tiles, tile, n)
    gram = jnp.pad(gram, ((0, 0), (0, missing), (0, missing)))
    blocks = gram.reshape(steps, tiles, tile, tiles, tile)
    own = jnp.diagonal(blocks, axis1=1, axis2=3)  # [S, tile, tile, tiles]
    return jnp.einsum("stin,sijt,stjn->stn", e, own, e, precision="highest")


def _in_scales(factors: jax.Array, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """Return [S, ceil(K / tile), N] in the shape of the scales."""
    moved = [shape[axis] for axis in layout.order]
    assert math.prod(moved) == factors.size
    return factors.reshape(moved).transpose(
        [layout.order.index(axis) for axis in range(len(shape))]
    )
