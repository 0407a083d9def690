"""Checking parameters against the plan that they are given to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ..errors import QuantizationError
from ..program.arrays import is_array
from ..program.sites import short
from .plan import PlanData


def check_parameters(plan: PlanData, given: Mapping[str, Any]) -> None:
    """Raise QuantizationError unless parameters are those that a plan is for."""
    arrays = {path for path, leaf in given.items() if path in plan.leaves or is_array(leaf)}
    for path in sorted(plan.leaves.keys() ^ arrays):
        where = "the plan has and the parameters have not" if path in plan.leaves else (
            "the parameters have and the plan has not"
        )  # fmt: skip
        raise QuantizationError(
            f"The parameters are another tree than the plan's: {path} is one that {where}. "
            "Make the plan for these parameters."
        )
    for path, expected in plan.leaves.items():
        leaf = given[path]
        about = f"{path}{_because(plan, path)}"
        if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape"):
            raise QuantizationError(
                f"{about} is {leaf!r}, and only arrays can be quantized. Plan with abstract "
                "parameters, quantize real ones."
            )
        if leaf.shape != expected.shape or leaf.dtype != expected.dtype:
            raise QuantizationError(
                f"{about} is {short(leaf)}, but the plan was made for {short(expected)}. "
                "Make the plan for these parameters."
            )


def _because(plan: PlanData, path: str) -> str:
    weight = plan.weights.get(path)
    return "" if weight is None else f" (rule {weight.rule})"
