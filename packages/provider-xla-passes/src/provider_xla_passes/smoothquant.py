"""SmoothQuant: outliers of activations are moved to the parameter."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .base import TRANSFORM, Pass
from .state import Weight
from .transformed import Scaled


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
