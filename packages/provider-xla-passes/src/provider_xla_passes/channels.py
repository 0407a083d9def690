"""Passes that look at channels of activations: AWQ, SmoothQuant, Hadamard and Wanda.

Channels that matter are scaled up before they are rounded; outliers of activations are moved to the
parameter, or spread over many channels; elements become zeros by what they are multiplied with.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn

from .ranges import search
from .state import MASK, TRANSFORM, Pass, Weight, mask_of, output_squares
from .transformed import Rotated, Scaled

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


@dataclasses.dataclass(frozen=True)
class SmoothQuant(Pass):
    """Move outliers of activations, channel by channel, to the parameter.

    Each channel of the activation is divided, and that of the parameter multiplied, by
    ``s[k] = max|x[:, k]| ** alpha / max|w[k, :]| ** (1 - alpha)`` (Xiao et al. 2022,
    arXiv:2211.10438, equation 4), so that both are as easy to quantize. It changes contractions
    whose activations are quantized, and leaves others. The paper folds the scales into the layer
    before. Here they are applied at the contraction, so that no such layer is needed, and each
    parameter has separate scales.

    Attributes:
        alpha: how much of the outliers moves to the parameter, 0 to 1.

    Raises:
        ValueError: ``alpha`` is out of range.
    """

    alpha: float = 0.5

    stage = TRANSFORM
    needs_peaks = True

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"SmoothQuant.alpha must be from 0 to 1. Got {self.alpha!r}.")

    def run(self, weight: Weight) -> str | None:
        """Run it: see ``Pass.run``."""
        if not weight.layout.quantized:
            return "its activations stay float"
        assert weight.peaks is not None
        x, w = weight.peaks, jnp.abs(weight.w).max(-1)
        by = x**self.alpha / w ** (1 - self.alpha)
        # A channel that is always 0, in either operand, adds nothing: it is not scaled.
        usable = (x > 0) & (w > 0) & jnp.isfinite(by) & (by > 0)
        weight.transform(Scaled(jnp.where(usable, by, 1.0)))
        return None


@dataclasses.dataclass(frozen=True)
class Hadamard(Pass):
    """Rotate activations and parameters by random signs and Hadamard matrices.

    The result of the contraction stays the same, and no channel stands out any more, in the
    activation or in the parameter (incoherence: Tseng et al. 2024, QuIP#, arXiv:2402.04396,
    section 3; Ashkboos et al. 2024, QuaRot, arXiv:2404.00456). The activation is rotated at the
    contraction, which costs K * log2(block) operations per row beside the contraction's K * N. A
    kernel that quantizes rows may rotate them on the way. XLA rotates in separate passes over the
    activation, which take a visible share of an integer contraction's time. So rotate where there
    are outliers, in blocks no larger than needed.

    Attributes:
        block: how many channels are mixed, a power of two; None for the largest that divides K.
            Parameters whose K it does not divide are left.
        seed: seed of the signs.
        weight_path: regular expression that must match the whole pytree path of a parameter, as
            in rules; None for all. Other parameters are left.

    Raises:
        ValueError: ``block`` is not a power of two from 2, or ``weight_path`` not a pattern.
    """

    block: int | None = None
    seed: int = 0
    weight_path: str | None = None

    stage = TRANSFORM

    def __post_init__(self):
        block = self.block
        if block is not None and (block < 2 or block & (block - 1)):
            raise ValueError(
                f"Hadamard.block must be None or a power of two from 2. Got {block!r}."
            )
        try:
            re.compile(self.weight_path or "")
        except (TypeError, re.error) as error:
            raise ValueError(
                "Hadamard.weight_path must be None or a regular expression, got "
                f"{self.weight_path!r}: {error}."
            ) from error

    def run(self, weight: Weight) -> str | None:
        """Run it: see ``Pass.run``."""
        if self.weight_path is not None and not re.fullmatch(
            self.weight_path, weight.below, re.ASCII
        ):
            return f"weight_path is {self.weight_path}"
        k = weight.layout.k
        block = self.block or k & -k
        if block == 1 or k % block:
            return f"no block of {self.block or 2} or more channels divides {k}"
        # The signs of a parameter depend on its path, not on its place among the others.
        rng = np.random.default_rng([self.seed, zlib.crc32(weight.path.encode())])
        signs = rng.choice(np.array([-1, 1], np.int8), weight.w.shape[:2])
        weight.transform(Rotated(jnp.asarray(signs), block))
        return None


@dataclasses.dataclass(frozen=True)
class Wanda(Pass):
    """Choose the zeros of ``sparsity`` by ``|w[k, n]| * norm(x[:, k])``.

    The largest scores of each group stay, instead of the largest magnitudes (Sun et al. 2023,
    arXiv:2306.11695, section 3). Followed by ``Gptq``, the elements that stay make up for the
    zeros, as in SparseGPT (Frantar and Alistarh 2023, arXiv:2301.00774).
    """

    stage = MASK

    def run(self, weight: Weight) -> str | None:
        """Run it: see ``Pass.run``."""
        if weight.plan.sparsity is None:
            return "its rule has no sparsity"
        norms = jnp.sqrt(jnp.diagonal(weight.gram, axis1=-2, axis2=-1))
        score = jnp.abs(weight.w) * norms[..., None]
        weight.keep = mask_of(score, weight.layout, weight.plan.sparsity)
        return None
