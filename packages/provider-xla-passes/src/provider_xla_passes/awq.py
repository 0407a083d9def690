"""AWQ: channels that matter are scaled up before they are rounded."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn

from .base import TRANSFORM, Pass
from .ranges import search
from .state import Weight, output_squares
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
        factors = np.linspace(1.0, _LEAST_FACTOR, self.clip)
        return search(weight, list(zip(factors, factors, strict=True))) if self.clip > 1 else None

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


@functools.partial(jax.jit, static_argnums=1)
def _normal(squares: jax.Array, exponent: float) -> jax.Array:
    """Return an exponent's scales, normalized: largest times least is 1."""
    # Half the exponent, since these are squares. A channel that was always 0 is not scaled.
    scale = jnp.where(squares > 0, squares, 1.0) ** (exponent / 2)
    ends = scale.max(-1, keepdims=True), scale.min(-1, keepdims=True)
    return scale / jnp.sqrt(ends[0]) / jnp.sqrt(ends[1])
