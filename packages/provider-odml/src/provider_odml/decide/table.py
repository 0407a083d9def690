"""The table of a plan: what each operation becomes on the device, in columns as provider-xla's."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass

from ..capture.graph import ACTIVATION, WEIGHT, Use
from ..capture.ops import Passage
from .decision import ConstantUse, Decision, Decisions, DynamicUse, SiteUse, WeightUse

BITS = {"int2": 2, "int4": 4, "int8": 8, "int16": 16, "int32": 32}
INTEGER, FUSED, STORED, FLOAT = "integer", "fused", "float, integer weight", "float"
_SHORT = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Row:
    """One operation of a plan.

    Attributes:
        op_id: its id.
        operands: dtype and shape of the arrays that it reads, as ``f32[8,64]``.
        qtypes: the type of each on the device, as "int4/32" in blocks of 32; None for a float, and
            where it is fused.
        kernel: what computes it: "integer", a kernel of LiteRT; "fused", the kernel of another
            operation; "float, integer weight", a kernel for floats whose parameter is stored as
            integers; "float".
        into: the id of the operation that it is fused into.
        rule: the index of its rule.
        ranges: the sites that it quantizes with the range of: of its operands, then its output.
        reason: why it stays float, where a rule is for it.
        weights: the pytree paths of its parameters, where they are known.
        bytes_before: bytes of its quantized parameters as they are.
        bytes_after: the same in the file, without scales.
    """

    op_id: str
    operands: tuple[str, ...]
    qtypes: tuple[str | None, ...]
    kernel: str
    into: str | None
    rule: int | None
    ranges: tuple[str, ...]
    reason: str | None
    weights: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def rows(plan: Decisions) -> list[Row]:
    """Return a row for each operation of a plan."""
    heads: dict[str, str] = {}
    found = []
    for op_id, decision in plan.decisions.items():
        if decision.node.op.kind is Passage.OUTPUT:
            continue
        if decision.fused:
            made = (use.tensor for use in decision.node.activations)
            before = next(str(tensor) for tensor in made if tensor in plan.decisions)
            heads[op_id] = heads.get(before, before)
        found.append(_row(decision, plan, heads.get(op_id)))
    return found


def table(plan: Decisions) -> str:
    """Return a plan as a table, with a count of its rows."""
    from tabulate import tabulate

    found = rows(plan)
    headers = ["op", "operands", "runs as", "kernel", "rule", "ranges", "weight or reason", "bytes"]
    text = tabulate(list(map(_cells, found)), headers, tablefmt="simple", disable_numparse=True)
    return f"{text}\n{_count(found)}, {len(plan.sites)} ranges"


def _count(found: list[Row]) -> str:
    counts = Counter(row.kernel for row in found)
    whole = counts[INTEGER] + counts[FUSED]
    parts = [f"{whole} of {len(found)} operations in integers"]
    if whole:
        parts[0] += f" ({counts[INTEGER]} integer, {counts[FUSED]} fused)"
    if counts[STORED]:
        parts.append(f"{counts[STORED]} in float with integer weights")
    return ", ".join(parts)


def _cells(row: Row) -> list[str]:
    is_whole = row.kernel in (FLOAT, FUSED)
    return [
        row.op_id,
        " x ".join(row.operands),
        row.kernel if is_whole else " x ".join(qtype or "float" for qtype in row.qtypes),
        row.into or row.kernel,
        "" if row.rule is None else str(row.rule),
        ", ".join(row.ranges),
        row.reason or ", ".join(row.weights),
        f"{row.bytes_before:,} -> {row.bytes_after:,}" if row.bytes_before else "",
    ]


def _row(decision: Decision, plan: Decisions, into: str | None) -> Row:
    node = decision.node
    kernel = _kernel(decision, plan)
    sites = [use.site for use in decision.inputs.values() if isinstance(use, SiteUse)]
    sites += [] if decision.output is None else [decision.output.site]
    stored = [
        (use, placed.qtype)
        for use in node.uses
        if isinstance(placed := decision.inputs.get(use.slot), WeightUse | ConstantUse)
    ]
    reason = decision.reason
    if reason is None and kernel == FLOAT:
        reason = why(plan, decision)
    return Row(
        node.op_id,
        tuple(f"{_SHORT.get(u.dtype, u.dtype)}[{','.join(map(str, u.shape))}]" for u in node.uses),
        tuple(
            None if kernel in (FLOAT, FUSED) else _qtype(use, decision, plan) for use in node.uses
        ),
        kernel,
        into,
        decision.rule,
        tuple(dict.fromkeys(sites)),
        reason,
        tuple(use.path for use in node.uses if use.role == WEIGHT and use.path is not None),
        sum(math.prod(use.shape) * _itemsize(use) for use, _ in stored),
        sum(stored_bytes(use, qtype) for use, qtype in stored),
    )


def _kernel(decision: Decision, plan: Decisions) -> str:
    if decision.is_float:
        return FLOAT
    if decision.fused:
        return FUSED
    is_static = decision.rule is None or plan.rules[decision.rule].is_static
    dynamic = any(isinstance(use, DynamicUse) for use in decision.inputs.values())
    return INTEGER if is_static or dynamic or decision.output is not None else STORED


def _qtype(use: Use, decision: Decision, plan: Decisions) -> str | None:
    """Return the type of an operand on the device."""
    placed = decision.inputs.get(use.slot)
    match placed:
        case WeightUse(qtype=qtype, tile_size=int(size)):
            return f"{qtype}/{size}"
        case WeightUse(qtype=qtype) | ConstantUse(qtype=qtype):
            return qtype
        case DynamicUse():
            return "int8"
        case SiteUse(site=key):
            return plan.sites[key].qtype
    if use.role == ACTIVATION and decision.output is not None:
        return plan.sites[decision.output.site].qtype
    rule = None if decision.rule is None else plan.rules[decision.rule]
    return str(rule.output_qtype) if rule is not None and rule.is_static else None


def why(plan: Decisions, decision: Decision) -> str:
    """Return why an operation stays float that no reason was given for."""
    if decision.rule is None:
        return "no rule matches"
    rule = plan.rules[decision.rule]
    if rule.weight_qtype is None and rule.output_qtype is None:
        return "its rule has no qtypes"
    return "its rule is for matmuls with parameters alone"


def stored_bytes(use: Use, qtype: str) -> int:
    """Return the bytes of a parameter in the file, without its scales."""
    return -(-BITS[qtype] * math.prod(use.shape) // 8)


def _itemsize(use: Use) -> int:
    return int("".join(filter(str.isdigit, use.dtype))) // 8


def as_json(plan: Decisions) -> dict:
    """Return a plan as JSON values."""
    return {
        "ops": [asdict(row) for row in rows(plan)],
        "sites": [asdict(site) for site in plan.sites.values()],
        "rules": [str(rule) for rule in plan.rules],
        "problems": list(plan.problems),
    }
