"""The adapter of one parameter, as a plan has it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ..forms.adapted import AdapterForm


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """The adapter of one parameter, wherever the program uses it.

    Attributes:
        path: pytree path of the parameter.
        dtype: its dtype.
        rule: the number of the rule.
        ops: the ids of the operations whose rule asked for it.
        form: what it computes, and the shapes of its arrays.
    """

    path: str
    dtype: np.dtype
    rule: int
    ops: tuple[str, ...]
    form: AdapterForm

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its arrays, by name."""
        return dict(self.form.shapes)

    @property
    def size(self) -> int:
        """The number of elements of its arrays."""
        return sum(map(math.prod, self.form.shapes.values()))

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = {"path": self.path, "dtype": self.dtype.name, "rule": self.rule, "ops": self.ops}
        values |= dataclasses.asdict(self.form) | {"kind": self.form.kind, "shapes": self.shapes}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
