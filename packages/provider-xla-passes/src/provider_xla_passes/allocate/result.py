"""The result of an allocation, as it is shown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from provider_xla.features import table


@dataclasses.dataclass(frozen=True)
class AllocatedWeight:
    """What the allocation gave one parameter or derived weight.

    Attributes:
        path: its pytree path, or how it is computed.
        elements: how many it has.
        qtype: its format.
        tile_size: elements per scale along a tiled axis; None without tiles.
        bytes: of quantized values and scales, as they are saved.
        error: of the output if only this weight, and those that share its parameters, are
            quantized.
    """

    path: str
    elements: int
    qtype: str
    tile_size: int | None
    bytes: int
    error: float

    @property
    def bits(self) -> float:
        """Return the bits per element, scales included."""
        return 8 * self.bytes / max(self.elements, 1)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """The result with one format for all parameters that can have it.

    Attributes:
        name: the format.
        bytes: of all quantized parameters.
        bits: per element of those, scales included.
        predicted: the sum of the errors of single parameters.
        measured: the error of the output.
    """

    name: str
    bytes: int
    bits: float
    predicted: float
    measured: float


@dataclasses.dataclass(frozen=True)
class Allocation:
    """How bits are given to parameters. ``print(allocation)`` shows it as a table.

    Errors are those of the output on the batch: its squared error over its squared norm, or what
    ``error=`` returned.

    Attributes:
        weights: what each parameter got.
        budget: the most bytes that all quantized parameters may take.
        predicted: the sum of the errors of single parameters, which the allocation minimizes.
        measured: the error of the output.
        uniform: the results of one format for all parameters, to compare with.
        errors: the error that was measured for each parameter in each format, by the paths of what
            has one format: a parameter and the derived weights that share it. Pass it to
            ``allocate`` with the same batch and another budget.
    """

    weights: tuple[AllocatedWeight, ...]
    budget: int
    predicted: float
    measured: float
    uniform: tuple[Uniform, ...]
    errors: Mapping[tuple[str, ...], Mapping[str, float]]

    @property
    def bytes(self) -> int:
        """Return the saved bytes of all quantized parameters."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def bits(self) -> float:
        """Return the bits per quantized element, scales included."""
        return 8 * self.bytes / max(sum(weight.elements for weight in self.weights), 1)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        weights = [dataclasses.asdict(one) | {"bits": one.bits} for one in self.weights]
        return {
            "weights": weights,
            "budget": self.budget,
            "bytes": self.bytes,
            "bits": self.bits,
            "predicted": self.predicted,
            "measured": self.measured,
            "uniform": [dataclasses.asdict(one) for one in self.uniform],
            "errors": [
                {"paths": list(paths), "errors": dict(row)} for paths, row in self.errors.items()
            ],
        }

    def __str__(self) -> str:
        weights = [
            [w.path, f"{w.elements:,}", w.qtype, str(w.tile_size or ""), f"{w.bits:.2f}",
             _short(w.error)]
            for w in self.weights
        ]  # fmt: skip
        own = Uniform("allocated", self.bytes, self.bits, self.predicted, self.measured)
        totals = [
            [u.name, f"{u.bytes:,}", f"{u.bits:.2f}", _short(u.predicted), _short(u.measured),
             _decibel(u.measured)]
            for u in (own, *self.uniform)
        ]  # fmt: skip
        head = ["weight", "elements", "qtype", "tile", "bits", "error"]
        above = table(weights, head, right=(1, 3, 4, 5))
        head = ["all weights", "bytes", "bits", "predicted", "measured", "SQNR"]
        below = table(totals, head, right=range(1, 6))
        return f"{above}\n\n{below}\nat most {self.budget:,} bytes"


def _short(error: float) -> str:
    return f"{error:.2e}"


def _decibel(error: float) -> str:
    return f"{-10 * math.log10(error):.1f} dB" if error > 0 else ""
