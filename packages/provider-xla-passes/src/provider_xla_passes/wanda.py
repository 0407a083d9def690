"""Wanda: which elements become zeros, by what they are multiplied with."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .base import MASK, Pass
from .state import Weight, mask_of


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
