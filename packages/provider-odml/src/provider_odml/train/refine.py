"""Rules that leave alone what a static range would cost too much."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..capture.ops import Scales
from ..decide.decision import Decision, SiteUse, WeightUse
from ..decide.plan import Plan
from ..decide.rules import OdmlRule
from ..errors import OdmlError
from ..trees import split
from .noise import Measuring
from .provider import QatModel
from .statistics import QuantStats

_ROUNDS = 16
"""A tensor that is no longer rounded where it is made may be rounded where it is read: how often
rules are added before the rest is left as it is."""


def refine(
    model: QatModel, params: Any, batches: Iterable[Sequence[Any]], *, least: float = 25.0
) -> tuple[OdmlRule, ...]:
    """Return the rules of a model, behind rules for what static ranges cost too much.

    The tensors of the float model are rounded to the ranges of the same batches, one at a time.
    Where the median row has a signal to noise below ``least``, what makes the tensor and what reads
    it get a rule without a static range: contractions a dynamic range, all else float. Norms
    that are written out in single operations and tensors with a few huge elements are found so.

    Args:
        model: what ``qat`` returned.
        params: the parameters: a pytree of arrays.
        batches: as in ``QatModel.calibrate``.
        least: the least signal to noise of a tensor, in decibels.

    Returns:
        Rules for ``qat`` and ``export``. The new ones say why in ``OdmlRule.reason``.

    Raises:
        OdmlError: as ``QatModel.calibrate``.
    """
    if not isinstance(batches, Iterable):
        raise OdmlError(f"batches must be an iterable of tuples, got {batches!r}.")
    batches = list(batches)
    provider = copy.copy(model.provider)
    for _ in range(_ROUNDS):
        refined = provider.apply(model.fn)
        stats = refined.calibrate(params, batches)
        ratios = _measured(refined, stats, params, batches)
        added = list(_exceptions(refined.plan(*_with(refined, params, batches[0])), ratios, least))
        if not added:
            break
        provider = copy.copy(provider)
        provider.rules = (*added, *provider.rules)
    return provider.rules


def _with(model: QatModel, params: Any, batch: Sequence[Any]) -> tuple[Any, ...]:
    args = list(batch)
    args.insert(model.provider.params_argnum, params)
    return tuple(args)


def _measured(
    model: QatModel, stats: QuantStats, params: Any, batches: Sequence[Sequence[Any]]
) -> dict[str, float]:
    """Return signal to noise of each site in decibels, the worst of batches and steps."""
    rows = np.zeros(len(stats.state))
    for batch in batches:
        arrays, rebuild = split(_with(model, params, batch))
        found = jax.jit(lambda arrays, stats: model.run(Measuring(stats), rebuild(arrays), {}))  # noqa: B023
        rows = np.maximum(rows, np.asarray(found(arrays, stats)))
    with np.errstate(divide="ignore"):
        decibels = -10 * np.log10(rows)
    return {key: float(decibels[stats.rows(key)].min()) for key in stats}


def _exceptions(plan: Plan, measured: dict[str, float], least: float) -> Iterator[OdmlRule]:
    """Return rules for the operations around tensors that lose too much."""
    worst: dict[str, float] = {}
    for key, decibels in measured.items():
        if decibels >= least:
            continue
        for op_id, decision in plan.decisions.items():
            uses = [*decision.inputs.values(), decision.output]
            if any(isinstance(use, SiteUse) and use.site == key for use in uses):
                for one in _fused_with(plan, op_id):
                    worst[one] = min(decibels, worst.get(one, decibels))
    rules: dict[tuple[str, OdmlRule], dict[str, float]] = {}
    for op_id, decibels in worst.items():
        decision = plan.decisions[op_id]
        node, rule = decision.node, _without_range(plan, decision)
        if rule is not None:
            names = rules.setdefault((node.module_path, rule), {})
            names[node.op.name] = min(decibels, names.get(node.op.name, decibels))
    for (path, rule), names in rules.items():
        reason = f"a static range leaves {min(names.values()):.1f} dB"
        yield OdmlRule(
            module_path=re.escape(path),
            op_names=tuple(names),
            weight_qtype=rule.weight_qtype,
            output_qtype=rule.output_qtype,
            input_qtype=rule.input_qtype,
            weight_calibration_method=rule.weight_calibration_method,
            reason=reason,
        )


def _fused_with(plan: Plan, op_id: str) -> Iterator[str]:
    """Return an operation, and those before it that it is folded into."""
    yield op_id
    decision = plan.decisions[op_id]
    if decision.fused:
        for use in decision.node.activations:
            if use.tensor in plan.decisions:
                yield from _fused_with(plan, use.tensor)


def _without_range(plan: Plan, decision: Decision) -> OdmlRule | None:
    """Return what is done at an operation instead; None if it has no static range."""
    rule = None if decision.rule is None else plan.rules[decision.rule]
    if rule is None or not rule.is_static:
        return None
    method = rule.weight_calibration_method
    if decision.node.op.kind is Scales.LOOKUP:
        return OdmlRule(weight_qtype=rule.weight_qtype, weight_calibration_method=method)
    if any(isinstance(use, WeightUse) for use in decision.inputs.values()):
        return OdmlRule(
            weight_qtype=rule.weight_qtype,
            input_qtype="int8",
            weight_calibration_method=method,
        )
    return OdmlRule()
