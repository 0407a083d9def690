"""Derived weights: values of parameters and constants alone, computed once and stored."""

from __future__ import annotations

import dataclasses

import numpy as np

from hijax_trace import Expression


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """How a derived weight is computed.

    Attributes:
        path: its name in a plan, which is the text of its expression.
        expression: computes it from parameters.
        carrier: the pytree path of the parameter that it is stored beside.
        shape: its shape. If a loop computes it, leading axes hold all steps.
        dtype: its float dtype.
    """

    path: str
    expression: Expression
    carrier: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def leaves(self) -> tuple[str, ...]:
        """The pytree paths of the parameters that it is computed from."""
        return tuple(leaf.path for leaf in self.expression.leaves())
