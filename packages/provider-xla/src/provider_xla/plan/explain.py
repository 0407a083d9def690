"""A plan in words: all of it, one operation or parameter, and rules without effect."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import quant_numerics as qn
from interception_core import matches_path

from ..errors import QuantizationError
from ..program.facts import Code, Fact
from ..program.matching import Rules, follows_values
from ..program.record import Choice, OpRecord
from ..rules.rule import QuantizationRule
from ..tables import fold_lines
from .weight import WeightPlan


def shown(plan: Any) -> str:
    """Return a plan as text: what is stored, what is to be known, and the table."""
    table = plan.ops.table({path: weight.bytes for path, weight in plan.weights.items()})
    before, after = (f"{n / 2**20:.2f} MiB" for n in (plan.bytes_before, plan.bytes_after))
    count = sum(path in plan.weights or path in plan.absorbed for path in plan.leaves)
    lines = [f"{count} of {len(plan.leaves)} parameters quantized: {before} -> {after}"]
    left = floats(plan)
    line = f"{sum(size for _, size, _ in left) / 2**20:.2f} MiB of parameters stay float"
    shown = [f"{path} {size / 2**20:.2f} MiB ({why})" for path, size, why in left[:3]]
    shown += [f"{len(left) - 3} more"] * (len(left) > 3)
    lines.append(": ".join(filter(None, [line, ", ".join(shown)])))
    derived = [weight.derived for weight in plan.derived.values() if weight.derived]
    lines += fold_lines([f"derived: {one.path}, of {', '.join(one.leaves)}" for one in derived])
    if plan.adapters:
        numbers = sum(adapter.size for adapter in plan.adapters.values())
        lines.append(f"{len(plan.adapters)} parameters have adapters: {numbers:,} numbers to train")
    for why, (first, *others) in in_xla(plan).items():
        more = f" and {len(others)} more" if others else ""
        lines.append(f"in XLA: {first}{more}: {why}")
    lines += fold_lines([f"problem: {problem}" for problem in plan.problems])
    lines += fold_lines([f"cache: {cache}" for cache in plan.caches.values()])
    lines += fold_lines([f"note: {note}" for note in plan.notes])
    return "\n".join([*lines, "", table])


def floats(plan: Any) -> tuple[tuple[str, int, str], ...]:
    """Return the parameters that stay float: see ``Plan.floats``."""
    uses: dict[str, list[OpRecord]] = {}
    for op in plan.ops:
        for path in set(op.paths):
            uses.setdefault(path, []).append(op)
    found = []
    for path, leaf in plan.leaves.items():
        if path not in plan.weights and path not in plan.absorbed:
            why = _why_float(plan, path, uses.get(path, []))
            found.append((path, leaf.size * leaf.dtype.itemsize, why))
    return tuple(sorted(found, key=lambda one: -one[1]))


def _why_float(plan: Any, path: str, ops: Sequence[OpRecord]) -> str:
    if not ops:
        if (op := next((op for op in plan.ops if path in op.beside), None)) is not None:
            return f"{op.op_id}: {Code.BESIDE_WEIGHT()}"
        codes = {op.why.code for op in plan.ops if op.why is not None}
        # The patch engine knows a parameter by its identity alone.
        if Code.UNFOLLOWED in codes or not follows_values(plan.engine):
            return "no matmul, convolution or lookup is known to use it"
        # Rows at one index are slices, which are looked at only where a rule names lookups.
        lookup = "lookup" if plan.rules.looks_up else "gather"
        return f"no matmul, convolution or {lookup} uses it"
    first = next((op for op in ops if op.rule is not None), ops[0])
    other = "a weight computed from it is stored" if path in plan.derived_from else ""
    if first.rule is not None and plan.rules.rules[first.rule].weight_qtype is None:
        other = other or "its rule has no weight_qtype"
    return f"{first.op_id}: " + (first.reason or other or "it can't be stored")


def in_xla(plan: Any) -> dict[str, tuple[str, ...]]:
    """Return the contractions of stored weights that no kernel computes: see ``Plan.in_xla``."""
    found: dict[str, tuple[str, ...]] = {}
    # Not by the weight's path: a program may join several weights, or derive one.
    stored = {op_id for weight in plan.weights.values() for op_id in weight.ops}
    for op in plan.ops:
        choice = next(iter(op.kernels.values()), Choice(None, None))
        if op.op_id in stored and choice.reason is not None and not choice.is_lookup:
            found[choice.reason] = (*found.get(choice.reason, ()), op.op_id)
    return found


def explain(plan: Any, name: str) -> str:
    """Return why an operation or a parameter is as it is: see ``Plan.explain``."""
    ops = {op.op_id: op for op in plan.ops}
    known = [*ops, *plan.leaves, *(one.path for one in plan.derived.values())]
    # All of a name counts more than one of its parts, and that more than some letters of it.
    ways = (
        [one for one in known if one == name],
        [one for one in plan.leaves if one.endswith((f"['{name}']", f".{name}", f"[{name}]"))],
        [one for one in plan.leaves if one.endswith(name)],
        [one for one in ops if name in one.split("/")],
        [one for one in known if name in one],
    )
    found = next(filter(None, ways), [])
    if len(found) != 1:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
        what = f"{len(found)} have it: {', '.join(found[:5])}" if found else (
            f"the nearest are {', '.join(near) or 'none'}"
        )  # fmt: skip
        raise QuantizationError(
            f"name must be that of one operation or parameter of the plan, got {name!r}, and "
            f"{what}. print(plan) lists all."
        )
    (one,) = found
    lines = _of_op(plan, ops[one]) if one in ops else _of_parameter(plan, one)
    return "\n".join(lines)


def _of_op(plan: Any, op: OpRecord) -> Iterator[str]:
    yield f"{op.op_id}: {op.op_name} of {' and '.join(op.operands)}"
    yield from _rules(plan, op)
    quantized = [
        f"{side} in {qtype}"
        for side, qtype in zip(("the left operand", "the right one"), op.qtypes, strict=True)
        if qtype is not None
    ]
    if quantized and op.reason is None:
        yield f"it runs with {' and '.join(quantized)}"
    elif op.reason is not None:
        yield f"it stays float: {op.reason}"
        before = "" if op.rule is None else f", before rule {op.rule}"
        code = None if op.why is None else op.why.code
        if code is Code.NO_WEIGHT:
            yield "Rule(..., activations=True), or ops= with its name, is for two activations, too"
        elif op.op_name == "take":
            yield f"a rule with ops=['take'] and a format{before} changes that"
        elif code in (Code.LEFT_FLOAT, Code.NO_RULE):
            yield f"a rule with a format for {op.module_path or 'all paths'}{before} changes that"
    yield from _kernels(op, "  ")
    for weight in plan.derived.values():
        if op.op_id in weight.ops:
            yield f"its weight is derived, {weight.path}: {_stored(weight)}"
    for path in op.paths:
        state = plan.weights.get(path)
        yield f"parameter {path}: " + (_stored(state) if state else _float(plan, path))
        if path in plan.adapters:
            yield f"  {_adapter(plan, path)}"


def _of_parameter(plan: Any, path: str) -> Iterator[str]:
    weight, leaf = plan.weights.get(path), plan.leaves.get(path)
    if leaf is not None:
        yield f"{path}: {leaf.dtype.name}{list(leaf.shape)}"
    if weight is not None:
        yield _stored(weight)
        for platform, packing in weight.packings.items():
            yield f"on {platform} it is packed by {packing.op} for the kernels of its operations"
    else:
        yield _float(plan, path)
    if path in plan.adapters:
        yield _adapter(plan, path)
    beside = plan.beside(path) if leaf is not None else {}
    yield from (f"stored beside it: {one.path}, {_stored(one)}" for one in beside.values())
    uses = [op for op in plan.ops if path in op.paths or op.op_id in (weight.ops if weight else ())]
    for op in uses:
        yield f"used by {op.op_id}" + (f", which stays float: {op.reason}" if op.reason else "")
        yield from _rules(plan, op, "  ")
        yield from _kernels(op, "  ")


def _rules(plan: Any, op: OpRecord, indent: str = "") -> Iterator[str]:
    """Yield what each rule says of an operation, up to the one that decides."""
    last = len(plan.rules.rules) if op.rule is None else op.rule + 1
    for i, rule in enumerate(plan.rules.rules[:last]):
        verdict = "decides" if i == op.rule else "does not match"
        yield f"{indent}rule {i} ({_given(rule) or 'no fields'}) {verdict}"
    if op.rule is None and op.op_name == "take":
        yield f"{indent}no rule names lookups here, as one with ops=['take'] does"
    elif op.rule is None:
        yield f"{indent}no rule matches {op.module_path or 'the top level'}"


def _kernels(op: OpRecord, indent: str) -> Iterator[str]:
    for platform, choice in op.kernels.items():
        if choice.kernel is not None:
            yield f"{indent}on {platform} it runs in {choice.kernel}"
        else:
            yield f"{indent}on {platform} XLA computes it: {choice.reason or 'no kernel is asked'}"


def _adapter(plan: Any, path: str) -> str:
    adapter = plan.adapters[path]
    return f"it has an adapter of {adapter.form.label}: {adapter.size:,} numbers to train"


def _stored(weight: WeightPlan) -> str:
    shape = list(weight.granularity.scale_shape(weight.shape))
    return (
        f"stored in {weight.qtype} by rule {weight.rule}, scales of shape {shape}: "
        f"{weight.bytes_before:,} -> {weight.bytes_after:,} bytes"
    )


def _float(plan: Any, path: str) -> str:
    if path in plan.absorbed:
        return "nothing is stored for it itself, since only derived weights use it"
    why = {one: reason for one, _, reason in floats(plan)}
    dtype = plan.leaves[path].dtype
    kept = "float" if dtype in qn.FLOAT_DTYPES else str(dtype)
    return f"it stays {kept}: {why.get(path, 'no rule matches its operations')}"


_SHOWN = 5


def why_unused(
    index: int, rules: Rules, records: Sequence[OpRecord], leaves: Sequence[str]
) -> Fact:
    """Return that a rule has no effect, and why; ``leaves`` are the parameters' paths."""
    rule = rules.rules[index]
    why = _why(index, rule, rules, records, leaves)
    return Code.UNUSED(rule=index, shown=f"{type(rule).__name__}({_given(rule)})", why=why)


def _given(rule: QuantizationRule) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in rule.given.items())


def _why(
    index: int,
    rule: QuantizationRule,
    rules: Rules,
    records: Sequence[OpRecord],
    leaves: Sequence[str],
) -> str:
    paths = dict.fromkeys(record.module_path for record in records)  # in the program's order
    below = rules.below(leaves)
    if not records:
        return "the program has no operation that rules can match"
    if not any(matches_path(rule.module_path, path) for path in paths):
        known = (
            "no operation has a module path"
            if [*paths] == [""]
            else _known("the module paths are", rule.module_path, paths)
        )
        return f"its module_path matches no operation; {known}"
    if rule.op_names is not None and not {record.op_name for record in records} & {*rule.op_names}:
        names = dict.fromkeys(record.op_name for record in records)
        return (
            f"no operation has its op_names; {_known('there are', ' '.join(rule.op_names), names)}"
        )
    if rule.weight_path is not None and not rule.matches_weight(below):
        known = _known("the parameters are", rule.weight_path, below)
        return f"its weight_path matches no parameter; {known}"
    for record in records:
        own = rules.below(record.paths)
        matches = rule.matches(
            record.op_name, record.module_path, own, has_weight=bool(record.paths)
        )
        if matches and record.rule is not None and record.rule < index:
            return f"rule {record.rule} decides about {record.op_id} before it"
    return "no operation has all that it asks for"


def _known(what: str, asked: str, names: Iterable[str]) -> str:
    """Return which names there are, and the one that is most like what was asked for."""
    names = list(dict.fromkeys(filter(None, names)))
    near = difflib.get_close_matches(asked, names, 1, cutoff=0.3)
    shown = [repr(name) for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    nearest = f", the nearest is {near[0]!r}" if near and len(names) > 1 else ""
    return f"{what} {', '.join(shown)}{more}{nearest}"
