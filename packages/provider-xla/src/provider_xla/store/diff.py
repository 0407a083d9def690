"""Differences between stored parameters and a plan or template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import Carrier

from ..errors import PlanDiff
from .forms import of_today, rule_json, take_apart
from .tree import Leaf, named_leaves

if TYPE_CHECKING:
    from ..plan.plan import Plan


Facts = Mapping[str, Any]
"""What is known of a leaf: "shape", "dtype", "is" (a qtype or "float"), "method"; of its scales,
"scales" (their shape), "scale_dtype" and "ragged_tiles"."""


def compare(stored: Sequence[Facts], rules: Sequence[Facts] | None, plan: Plan) -> PlanDiff:
    """Return what differs between the parameters of a file and a plan's."""
    _, leaves = named_leaves(plan.params)
    planned = {leaf.name: of_plan(plan, leaf) for leaf in leaves}
    differ = []
    if rules is not None:
        planned_rules = [rule_json(rule) for rule in plan.rules.rules]
        differ = _rules([*map(of_today, rules)], planned_rules)
    found = {leaf["name"]: leaf for leaf in stored}
    for name in _adapters(found, planned, plan):
        del found[name]
    return _diff(found, planned, differ)


def _adapters(stored: Mapping[str, Facts], planned: Mapping[str, Facts], plan: Plan) -> set[str]:
    """Return a file's leaves that are a plan's adapters, by any name.

    Each framework stores them under other names. So the leaves that the plan does not have are
    taken for its adapters if they are floats, and their shapes are exactly those of the adapters.
    """
    extra = stored.keys() - planned.keys()
    adapters = plan.adapters.values()
    shapes = Counter(shape for adapter in adapters for shape in adapter.shapes.values())
    is_float = all(stored[name]["is"] == "float" for name in extra)
    found = Counter(tuple(stored[name].get("shape", ())) for name in extra)
    return set(extra) if is_float and found == shapes else set()


def compare_template(stored: Sequence[Facts], leaves: Sequence[Leaf]) -> PlanDiff:
    """Return what differs between a file's parameters and a template.

    A leaf of a template is the stored form, or the float array that it stands for.
    """
    wanted = {}
    for leaf in leaves:
        facts = _facts(leaf)
        if facts["is"] == "float":
            del facts["is"]
        wanted[leaf.name] = facts
    return _diff({leaf["name"]: leaf for leaf in stored}, wanted, ())


def of_plan(plan: Plan, leaf: Leaf) -> dict[str, Any]:
    """Return what a plan makes of a leaf."""
    facts, path = _facts(leaf), plan.prefix + leaf.path
    weight = plan.weights.get(path)
    derived = plan.beside(path).values()
    if derived or path in plan.absorbed or path in plan.derived_from:
        own = None if path in plan.absorbed else weight.qtype if weight else "float"
        return {**facts, "is": beside(own, [(w.qtype, w.shape) for w in derived])}
    if weight is None:
        return facts
    ragged = weight.granularity.ragged_tiles(weight.shape)
    return {
        **facts,
        "is": weight.qtype,
        "scales": list(weight.granularity.scale_shape(weight.shape)),
        "scale_dtype": weight.scale_dtype or qn.get_qtype(weight.qtype).scale_dtype.name,
        "ragged_tiles": [list(pair) for pair in ragged],
        "method": weight.method,
    }


def beside(own: str | None, derived: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Return a text of the derived weights stored with a parameter."""
    beside = ", ".join(f"{qtype}{list(shape)}" for qtype, shape in derived)
    return f"{own or 'nothing'}, and derived weights: {beside or 'elsewhere'}"


def _facts(leaf: Leaf) -> dict[str, Any]:
    value = leaf.value
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return {"is": take_apart(leaf.name, value).kind}
    facts = {"shape": list(value.shape), "dtype": _dtype(value.dtype), "is": "float"}
    if isinstance(value, Carrier):
        found = [(one.qtype, one.shape) for one in value.derived.values()]  # type: ignore[attr-defined]
        own = None if value.own is None else getattr(value.own, "qtype", "float")
        return {**facts, "is": beside(own, found)}
    if hasattr(value, "qtype"):
        facts["is"] = value.qtype
        if hasattr(value, "scale"):
            facts["scales"] = list(value.scale.shape)
            facts["scale_dtype"] = _dtype(value.scale.dtype)
            facts["ragged_tiles"] = [list(pair) for pair in value.ragged_tiles]
    return facts


def _dtype(dtype: Any) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:  # of random keys
        return str(dtype)


def _diff(
    stored: Mapping[str, Facts], planned: Mapping[str, Facts], rules: Sequence[str]
) -> PlanDiff:
    changed = {}
    for name, facts in planned.items():
        if name in stored and (found := _changes(stored[name], facts)):
            changed[name] = found
    missing = {n: _shown(f) for n, f in planned.items() if n not in stored}
    extra = {n: _shown(f) for n, f in stored.items() if n not in planned}
    return PlanDiff(changed, missing, extra, tuple(rules))


def _changes(stored: Facts, planned: Facts) -> list[tuple[str, str, str]]:
    found = []
    for what, label in (("shape", "shape"), ("dtype", "dtype"), ("is", "format")):
        if what in stored and what in planned and stored[what] != planned[what]:
            found.append((label, str(stored[what]), str(planned[what])))
    scaled = (
        "scales" in stored and "scales" in planned and stored.get("shape") == planned.get("shape")
    )
    if scaled and any(stored[what] != planned[what] for what in ("scales", "ragged_tiles")):
        found.append(("granularity", _granularity(stored), _granularity(planned)))
    # Scales beyond the range of float16 are float32, whatever the rule says.
    if scaled and stored["scale_dtype"] not in ("float32", planned["scale_dtype"]):
        found.append(("dtype of scales", stored["scale_dtype"], planned["scale_dtype"]))
    if "method" in stored and "method" in planned and stored["method"] != planned["method"]:
        found.append(("calibration method", stored["method"], planned["method"]))
    return found


def _granularity(facts: Facts) -> str:
    words, ragged = [], dict(facts["ragged_tiles"])
    for axis, (n, count) in enumerate(zip(facts["shape"], facts["scales"], strict=True)):
        if count == n and n > 1:
            words.append(f"per index of axis {axis}")
        elif count > 1:
            tile = ragged.get(axis - len(facts["shape"]), n // count)
            words.append(f"tiles of {tile} along axis {axis}")
    return " and ".join(words) or "per tensor"


def _shown(facts: Facts) -> str:
    if "shape" not in facts:
        return f"a {facts['is']}"
    if facts.get("is") in ("float", None):
        return f"{facts['dtype']}{facts['shape']}"
    return f"{facts['dtype']}{facts['shape']} quantized to {facts['is']}"


def _rules(stored: Sequence[Facts], planned: Sequence[Facts]) -> list[str]:
    lines = []
    for i in range(max(len(stored), len(planned))):
        if i >= len(planned):
            lines.append(f"rule {i}, only in the file: {_rule(stored[i])}")
        elif i >= len(stored):
            lines.append(f"rule {i}, only in the plan: {_rule(planned[i])}")
        elif stored[i] != planned[i]:
            fields = sorted({*stored[i], *planned[i]})
            both = [(f, stored[i].get(f, "default"), planned[i].get(f, "default")) for f in fields]
            words = ", ".join(f"{f} {a} -> {b}" for f, a, b in both if a != b)
            lines.append(f"rule {i}: {words}")
    return lines


def _rule(rule: Facts) -> str:
    fields = ", ".join(f"{key}={value!r}" for key, value in rule.items() if key != "class")
    return f"{rule['class']}({fields})"
