"""Trial: what other rules would make of the program of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import QuantizationError
from ..program.facts import Fact
from ..program.matching import Rules
from ..program.record import OpRecord
from .beside import kept_beside
from .make import make_plan, run_survey, weights_of
from .plan import Plan
from .survey import Survey
from .weight import WeightPlan


def tried(plan: Plan, rules: Rules, params: Any, batch: Sequence[Any]) -> dict[str, WeightPlan]:
    """Return how other rules store the weights of a plan's program.

    Args:
        plan: the plan.
        rules: the other rules.
        params: the parameters, arrays or types.
        batch: the other arguments of a call.

    Returns:
        By path, those that the rules can store: a weight with an operation that has no quantized
        form is left out, and raises no error.
    """
    survey = _Trial(rules, plan.leaves)
    run_survey(survey, plan.engine, plan.argnum, plan.fn, params, tuple(batch), {})
    found = weights_of(survey)
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
        batch: the other arguments of a call.

    Returns:
        The plan, with kernels if ``plan`` has some.

    Raises:
        QuantizationError: tiles do not fit a parameter.
    """
    kernels = any(op.kernels for op in plan.ops if op.quantized)
    return make_plan(rules, plan.engine, plan.argnum, plan.fn, params, tuple(batch), {}, kernels)


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
