"""Other rules for the program of a plan: what they would store, and the plan that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..errors import QuantizationError
from ..program.facts import Code, Fact
from ..program.matching import Rules
from ..program.record import OpRecord
from .beside import kept_beside
from .plan import Plan, make_plan
from .survey import Survey
from .weight import WeightPlan


def tried(plan: Plan, rules: Rules, params: Any, batch: Sequence[Any]) -> dict[str, WeightPlan]:
    """Return how other rules store the weights of a plan's program.

    Args:
        plan: the plan.
        rules: the other rules.
        params: the parameters, arrays or types.
        batch: the other arguments of a call. What it lacks of those by name is the plan's.

    Returns:
        By path, those that the rules can store: a weight with an operation that has no quantized
        form is left out, and raises no error.
    """
    survey = _Trial(rules, plan.leaves)
    survey.look_at(plan.engine, plan.argnum, plan.fn, params, tuple(batch), plan.keywords(batch))
    found = survey.weights()
    kept = [path for path, weight in plan.weights.items() if not weight.ops]
    return {
        path: weight
        for path, weight in {**found, **kept_beside(found, kept, plan.leaves)}.items()
        if survey.refused.isdisjoint(weight.parameters)
    }


def replanned(plan: Plan, rules: Rules, params: Any, batch: Sequence[Any]) -> Plan:
    """Make a plan of the same program with other rules.

    Args:
        plan: the plan.
        rules: the other rules.
        params: the parameters, arrays or types.
        batch: the other arguments of a call. What it lacks of those by name is the plan's.

    Returns:
        The plan, with kernels if ``plan`` has some, and with its caches, which no rule of ``rules``
        is about.

    Raises:
        QuantizationError: tiles do not fit a parameter.
    """
    kernels = any(op.kernels for op in plan.ops if op.quantized)
    engine, argnum, fn, kwargs = plan.engine, plan.argnum, plan.fn, plan.keywords(batch)
    made = make_plan(rules, engine, argnum, fn, params, tuple(batch), kwargs, kernels)
    of_caches = (one for one in plan.faults if one.code in (Code.NO_CACHE, Code.CACHE_FLOAT))
    return dataclasses.replace(made, caches=plan.caches, faults=(*made.faults, *of_caches))


class _Trial(Survey):
    """A survey that notes the parameters with an operation that rules refuse.

    Attributes:
        refused: their paths.
    """

    def __init__(self, rules: Rules, leaves: Any):
        super().__init__(rules, leaves)
        self.refused: set[str] = set()

    def record(self, record: OpRecord, problem: Fact | None) -> None:
        try:
            super().record(record, problem)
        except QuantizationError:
            self.refused.update(record.paths)

    def stored(self, call: Any, operand: Any, weight: Any, asked: Any) -> list[Any]:
        try:
            return super().stored(call, operand, weight, asked)
        except QuantizationError:
            self.refused.update(weight.paths)
            return []
