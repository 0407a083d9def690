"""Plan: where a program's tensors are quantized, before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .decision import Decisions
from .table import as_json, table


@dataclass(frozen=True)
class Plan(Decisions):
    """Where the tensors of a program are quantized. ``print(plan)`` shows it as a table.

    Attributes:
        decisions: by op id, in the program's order.
        sites: by key.
        rules: the rules.
        functions: the targets of all functions that are called. Also those where nothing is done
            are tapped, since operations inside them are not numbered.
        refused: which operations LiteRT can't compute as their rules say.
    """

    def chains(self) -> dict[str, str]:
        """Return, by contraction, the last operation folded into weight and bias."""
        return {d.head: op_id for op_id, d in self.decisions.items() if d.head is not None}

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values: its operations, sites, rules and problems."""
        return as_json(self)

    def __str__(self) -> str:
        return table(self)
