"""PassReport: what the passes did to each parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate


@dataclasses.dataclass(frozen=True)
class WeightErrors:
    """One parameter.

    Attributes:
        path: its pytree path.
        qtype: the name of its quantized type.
        rounded: the error by rounding alone; None where no pass can change it. Errors are those
            of the results of its contractions with the activations of the batches, root of the mean
            square relative to the results; the activations themselves as they are, in float.
        after: the error after each pass, by its name.
        reasons: by name of a pass, why it left the parameter as it was; for ``""`` why none
            could change it.
    """

    path: str
    qtype: str
    rounded: float | None
    after: Mapping[str, float]
    reasons: Mapping[str, str]


class PassReport(tuple[WeightErrors, ...]):
    """What passes did to each parameter. ``print(report)`` shows a table."""

    __slots__ = ()

    def as_json(self) -> list[dict[str, Any]]:
        """Return the rows as JSON values."""
        return [dataclasses.asdict(row) for row in self]

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row.after))
        headers = ["weight", "qtype", "rounding", *names, "left as it was"]
        rows = []
        for row in self:
            why = "; ".join(f"{name}: {why}" if name else why for name, why in row.reasons.items())
            errors = [row.rounded, *(row.after.get(name) for name in names)]
            cells = ["" if error is None else f"{error:.5f}" for error in errors]
            rows.append([row.path, row.qtype, *cells, why])
        return tabulate(rows, headers, tablefmt="simple", disable_numparse=True)
