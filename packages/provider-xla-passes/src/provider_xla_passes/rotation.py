"""Hadamard: outliers of a channel are spread over many."""

from __future__ import annotations

import dataclasses
import re
import zlib

import jax.numpy as jnp
import numpy as np

from .base import TRANSFORM, Pass
from .state import Weight
from .transformed import Rotated


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
