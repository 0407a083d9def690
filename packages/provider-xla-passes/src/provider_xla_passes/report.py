"""PassReport: what the passes did to each parameter; Optimized: it, with the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from provider_xla.features import table


@dataclasses.dataclass(frozen=True)
class WeightErrors:
    """The error of one parameter, after rounding and after each pass.

    An error is that of the results of its contractions with the float activations of the batches:
    the root of the mean squared difference, relative to that of the results.

    Attributes:
        path: its pytree path.
        qtype: the name of its quantized type.
        rounded: the error of rounding alone; None if no pass can change the parameter.
        after: the error after each pass, by the name of the pass.
        reasons: by the name of a pass, why it left the parameter as it was; under ``""``, why no
            pass can change it.
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
        return table(rows, headers)


class Optimized(NamedTuple):
    """What ``plan.optimize`` returns.

    Attributes:
        params: stored parameters, as ``plan.quantize`` returns them, for ``plan.apply``.
        report: what each pass did to each parameter.
    """

    params: Any
    report: PassReport
