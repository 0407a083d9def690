"""Measure what a ``QualityReport`` says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from interception_core import hide_frames, platform_of
from provider_xla import QuantizationError
from provider_xla.features import (
    SIDES,
    Lookup,
    Probed,
    Site,
    Statistics,
    as_batch,
    calibrations,
    follows_values,
    key_of,
    probe,
    read,
    run_operands,
    stored_operand,
)
from quant_numerics import Contraction

from .errors import (
    Sums,
    called,
    compare_outputs,
    difference,
    error_of,
    flops,
    measure_parameters,
    site_error,
    visits,
)
from .quality import QualityReport
from .results import Error, FloatOp, OpQuality, Range
from .timing import time_both, time_ops

if TYPE_CHECKING:
    from provider_xla import Plan

hide_frames(Path(__file__).parent)


def make_report(
    plan: Plan,
    params: Any,
    batches: Iterable[Sequence[Any]],
    statistics: Statistics | None,
    stored: Any,
    time: bool,
) -> QualityReport:
    """Make a report: see ``Plan.report``."""
    taken = list(map(as_batch, batches))
    if not taken:
        raise QuantizationError("There is nothing to measure on: batches is empty.")
    params = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, params)
    patches = not follows_values(plan.engine)
    if stored is None:
        # This raises if the parameters are not the plan's.
        stored = plan.quantize(params, prepack=False)
    elif patches:
        raise QuantizationError(
            "stored= is for plans of the trace engine: the patch engine quantizes parameters at "
            "each call. Make the plan with PtqProvider(engine='trace')."
        )
    if statistics is not None:
        statistics = read(statistics)
    per_visit, found = _probe(plan, params, stored, taken, statistics)
    packed = params if patches else plan.prepack(stored)
    quantized = plan.infer(plan.fn, statistics)
    outputs = compare_outputs(plan, quantized, params, packed, taken)
    seconds: dict[str, tuple[float, float]] = {}
    whole = (None, None)
    if time:
        whole = time_both(
            called(plan.fn, plan, params, taken[0]),
            called(quantized, plan, packed, taken[0]),
        )
        seconds = time_ops(plan, packed, taken[0], statistics, _mapped(found))
    ops, float_ops = _ops(plan, found, per_visit, seconds, whole[1], len(taken))
    ops = tuple(dataclasses.replace(op, ranges=_ranges(plan, statistics, op.op_id)) for op in ops)
    return QualityReport(
        ops,
        float_ops,
        measure_parameters(plan, params, stored, packed),
        outputs,
        plan.problems,
        len(taken),
        platform_of(next((x for x in jax.tree.leaves(packed) if isinstance(x, jax.Array)), None)),
        *whole,
    )


def _probe(
    plan: Plan,
    params: Any,
    stored: Any,
    batches: Sequence[tuple],
    statistics: Statistics | None,
) -> tuple[dict[str, int], dict[str, Probed]]:
    """Return each contraction's flops per visit, and the measurements."""
    per_visit: dict[str, int] = {}

    def count(op_id: str, contraction: Contraction, operands: Any, extras: Any) -> None:
        if op_id not in per_visit:
            lhs, rhs, *others = map(_type_of, (*operands, *extras))
            per_visit[op_id] = flops(contraction, lhs, rhs, tuple(others))

    def visit(site: Site) -> Sums:
        count(site.call.op_id, site.contraction, site.operands, site.extras)
        held = [stored_operand(site, side) for side in (0, 1)]
        operands, hows = run_operands(site, held)
        # A stored operand that can't be multiplied as quantized values is dequantized.
        operands = tuple(
            qvalue.restore().astype(x.dtype) if qvalue is not None and given is x else given
            for given, x, qvalue in zip(operands, site.operands, held, strict=True)
        )
        return site_error(site, hows, calibrations(statistics, site), operands)  # type: ignore[arg-type]

    def lookup(found: Lookup) -> Sums | None:
        if found.stored is None:
            return None
        table = found.stored.restore().astype(found.table.dtype)
        return difference(found.read(found.table), found.read(table))

    def leave(op_id: str, contraction: Contraction, operands: Any, extras: Any) -> Any:
        count(op_id, contraction, operands, extras)
        return visits(*operands)

    found = probe(plan, params, batches, visit, stored=stored, lookup=lookup, leave=leave)
    return per_visit, found


def _ranges(
    plan: Plan, statistics: Statistics | None, op_id: str
) -> tuple[Range | None, Range | None]:
    """Return the static ranges of an operation."""

    def one(side: str) -> Range | None:
        key, known = f"{op_id}#{side}", statistics or {}
        found = known.get(key, known.get(key_of(key, True)))
        if found is None or key not in plan.ranges:
            return None
        upper = np.asarray(found.upper)
        flat = None if found.lower is None else tuple(np.ravel(found.lower).tolist())
        steps = upper.shape[: upper.ndim - plan.ranges[key].ndim]
        return Range(tuple(upper.ravel().tolist()), flat, steps)

    return one(SIDES[0]), one(SIDES[1])


def _mapped(found: dict[str, Probed]) -> dict[str, int]:
    """Return, by operation, over how many examples the program maps it."""
    mapped = {}
    for op_id, one in found.items():
        if isinstance(one.total, Sums):
            visited, count = float(np.sum(one.total.visits)), int(np.sum(one.count))
            mapped[op_id] = max(1, round(visited / count)) if count else 1
    return mapped


def _ops(
    plan: Plan,
    found: dict[str, Probed],
    per_visit: dict[str, int],
    seconds: dict[str, tuple[float, float]],
    whole: float | None,
    batches: int,
) -> tuple[tuple[OpQuality, ...], tuple[FloatOp, ...]]:
    ops, float_ops = {}, {}
    mapped = _mapped(found)
    for record in plan.ops:
        op_id = record.op_id
        known = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        one = found.get(op_id)
        if record.quantized:
            if op_id in ops:
                continue
            sums = None if one is None else jax.tree.map(np.asarray, one.total)
            calls = 0.0 if sums is None else float(np.sum(sums.visits)) / batches
            share = calls / mapped.get(op_id, 1)
            in_float, quantized = (t * share for t in seconds.get(op_id, (math.nan, math.nan)))
            is_timed = op_id in seconds
            ops[op_id] = OpQuality(
                **known,
                calls=calls,
                error=error_of(sums),
                steps=_steps(sums),
                flops=round(per_visit.get(op_id, 0) * calls),
                float_seconds=in_float if is_timed else None,
                seconds=quantized if is_timed else None,
            )
        elif not record.is_in_parts:
            count = None
            if one is not None:
                # 0 if it was never seen to run, as in a branch that is not taken: unknown.
                count = round(per_visit[op_id] * float(np.sum(one.total)) / batches) or None
            float_ops.setdefault(op_id, FloatOp(**known, flops=count))
    return _shared(tuple(ops.values()), whole), tuple(float_ops.values())


def _shared(ops: tuple[OpQuality, ...], whole: float | None) -> tuple[OpQuality, ...]:
    """Return the operations with their share of the program's time."""
    if whole is None:
        return ops
    # Operations may take longer alone than in the program, where XLA fuses them.
    total = max(whole, sum(op.seconds or 0 for op in ops))
    return tuple(
        op if op.seconds is None else dataclasses.replace(op, share=op.seconds / total)
        for op in ops
    )


def _steps(sums: Sums | None) -> tuple[Error, ...]:
    if sums is None or not np.ndim(sums.signal):
        return ()
    flat = jax.tree.map(np.ravel, sums)
    return tuple(error_of(jax.tree.map(lambda x, i=i: x[i], flat)) for i in range(flat.signal.size))


def _type_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
