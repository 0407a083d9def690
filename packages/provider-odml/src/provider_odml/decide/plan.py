"""Plan: where a program's tensors are quantized, before anything is done, and its table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..capture.graph import ACTIVATION, WEIGHT, Use
from ..capture.ops import Passage
from .decision import ConstantUse, Decision, DynamicUse, Site, SiteUse, WeightUse
from .limits import why_slow
from .rules import OdmlRule

BITS = {"int2": 2, "int4": 4, "int8": 8, "int16": 16, "int32": 32}
INTEGER, FUSED, STORED, FLOAT = "integer", "fused", "float, integer weight", "float"
_SHORT = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}
_COLUMNS = ("op", "operands", "runs as", "kernel", "rule", "ranges", "weight or reason", "bytes")


@dataclass(frozen=True)
class Plan:
    """Where the tensors of a program are quantized. ``print(plan)`` shows it as a table.

    Attributes:
        decisions: by op id, in the program's order.
        sites: by key.
        rules: the rules.
        functions: the targets of all functions that are called. Also those where nothing is done
            are tapped, since operations inside them are not numbered.
        refused: which operations LiteRT can't compute as their rules say.
    """

    decisions: Mapping[str, Decision]
    sites: Mapping[str, Site]
    rules: tuple[OdmlRule, ...]
    functions: frozenset[str]
    refused: tuple[str, ...] = ()

    @property
    def idle(self) -> tuple[str, ...]:
        """That rules have no effect: which matters where no other program has the rules."""
        used = {decision.rule for decision in self.decisions.values()}
        rules = enumerate(self.rules)
        return tuple(f"rule {i} has no effect: {one!r}" for i, one in rules if i not in used)

    @property
    def problems(self) -> tuple[str, ...]:
        """Where rules can't be followed."""
        return (*self.refused, *self.idle)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is followed and takes longer on a CPU than in float, and what to do."""
        slow: dict[str, list[str]] = {}
        for op_id, decision in self.decisions.items():
            if decision.rule is not None:
                why = why_slow(decision.node, decision.inputs, self.rules[decision.rule])
                if why is not None:
                    slow.setdefault(why, []).append(op_id)
        return tuple(
            f"{len(ids)} operation{'s' * (len(ids) > 1)} ({ids[0]}"
            f"{', ...' * (len(ids) > 1)}): {why}"
            for why, ids in slow.items()
        )

    def chains(self) -> dict[str, str]:
        """Return, by contraction, the last operation folded into weight and bias."""
        return {d.head: op_id for op_id, d in self.decisions.items() if d.head is not None}

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values: its operations, sites, rules, problems and notes."""
        return {
            "ops": [asdict(row) for row in rows(self)],
            "sites": [asdict(site) for site in self.sites.values()],
            "rules": [str(rule) for rule in self.rules],
            "problems": list(self.problems),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from tabulate import tabulate

        found, heads = rows(self), list(_COLUMNS)
        cells = list(map(_cells, found))
        text = tabulate(cells, heads, tablefmt="simple", disable_numparse=True)
        counted = f"{_count(found)}, {len(self.sites)} ranges"
        return "\n".join([text, counted, *(f"slow in LiteRT: {one}" for one in self.notes)])


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


def rows(plan: Plan) -> list[Row]:
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


def _row(decision: Decision, plan: Plan, into: str | None) -> Row:
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


def _kernel(decision: Decision, plan: Plan) -> str:
    if decision.is_float:
        return FLOAT
    if decision.fused:
        return FUSED
    is_static = decision.rule is None or plan.rules[decision.rule].is_static
    dynamic = any(isinstance(use, DynamicUse) for use in decision.inputs.values())
    return INTEGER if is_static or dynamic or decision.output is not None else STORED


def _qtype(use: Use, decision: Decision, plan: Plan) -> str | None:
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


def why(plan: Plan, decision: Decision) -> str:
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
