"""AeqOptions: what the backend "aeq" can do that rules can't say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ..errors import OdmlError
from ..litert import AeqRule
from ..litert.aeq import Algorithm

FLOORS = {
    ("weight_only", 8): 20.0, ("dynamic", 8): 15.0, ("static", 8): 10.0,
    ("weight_only", 4): 3.0, ("dynamic", 4): 3.0, ("static", 4): 3.0,
    ("weight_only", 2): -3.0, ("dynamic", 2): -3.0, ("static", 2): -3.0,
}  # fmt: skip
"""Signal to noise, in decibels, below which a file is taken for broken: by mode and bits of the
parameters. 8 bits lose 30 to 50 dB in a product and 4 bits 15 to 20, which add up over the depth
of a model; an output that has nothing to do with JAX's is at -3."""


@dataclass(frozen=True)
class AeqOptions:
    """What ``export(..., backend="aeq")`` asks of ai-edge-quantizer beyond the rules.

    Attributes:
        algorithm: how scales are chosen: "min_max_uniform", "octav", "mse" or "gptq". It replaces
            the calibration methods of the rules.
        block_size: how many parameters share a scale, 32, 64, 128 or 256, in operations whose
            rule is dynamic; 0 for one scale per channel.
        min_elements: smaller parameters stay in float.
        calibration: for static rules and "gptq", the inputs of some runs: by signature, mappings
            from the names of the inputs to arrays. None for the sample data.
        min_sqnr: the least signal to noise of an output, in decibels. None for what is usual for
            the rules: 20 (weight-only), 15 (dynamic) or 10 (static) with 8 bits, 3 with 4 bits,
            -3 with 2 bits.

    Raises:
        OdmlError: a field has a value that is not allowed.
    """

    algorithm: Algorithm = "min_max_uniform"
    block_size: int = 0
    min_elements: int = 0
    calibration: Mapping[str, Iterable[Mapping[str, Any]]] | None = None
    min_sqnr: float | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            allowed = ", ".join(map(repr, get_args(Algorithm)))
            raise OdmlError(
                f"AeqOptions.algorithm must be one of {allowed}; got {self.algorithm!r}."
            )
        # Raises for what can't be of sizes of blocks, also together with the algorithm.
        AeqRule(algorithm=self.algorithm, block_size=self.block_size)
