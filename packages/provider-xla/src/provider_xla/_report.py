"""The report: every operation that a provider saw, and what it did with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operation.

    Attributes:
        op_id: see ``interception_core.OpCall``.
        op_name: the name that rules know it by.
        operands: dtype and shape of the operands, as ``f32[8,64]``.
        qtypes: qtype of both operands; None where it stays float.
        rule: index of the rule that decided, or None.
        reason: why the operation stays float; None if it is quantized.
        weight: pytree path of the parameter among the operands, where it is known.
    """

    op_id: str
    op_name: str
    operands: tuple[str, ...]
    qtypes: tuple[str | None, str | None]
    rule: int | None
    reason: str | None
    weight: str | None

    @property
    def quantized(self) -> bool:
        """Whether at least one operand is quantized."""
        return any(self.qtypes)


class Report(tuple[OpRecord, ...]):
    """The operations that a provider saw, in the order of their first appearance.

    ``print(report)`` shows it as a table.
    """

    __slots__ = ()

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the records as JSON values."""
        return [asdict(record) for record in self]

    def __str__(self) -> str:
        if not self:
            return "No operation was seen yet: call the wrapped function first."
        headers = ["op", "operands", "runs as", "rule", "weight or reason"]
        count = sum(record.quantized for record in self)
        table = tabulate(_rows(self), headers, tablefmt="simple", disable_numparse=True)
        return f"{table}\n{count} of {len(self)} operations quantized"


def _rows(records: Iterable[OpRecord]) -> list[list[str]]:
    return [
        [
            record.op_id,
            " x ".join(record.operands),
            " x ".join(qtype or "float" for qtype in record.qtypes)
            if record.quantized
            else "float",
            "" if record.rule is None else str(record.rule),
            record.reason or record.weight or "",
        ]
        for record in records
    ]


def _runs_as(record: OpRecord) -> str:
    if not record.quantized:
        return "float"
    return " x ".join(qtype or "float" for qtype in record.qtypes)
