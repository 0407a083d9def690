"""Unused: why a rule has no effect, and what it could match."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from interception_core import matches_path

from ..program.facts import Code, Fact
from ..program.matching import Rules
from ..program.record import OpRecord
from ..rules.rule import QuantizationRule

_SHOWN = 5


def why_unused(
    index: int, rules: Rules, records: Sequence[OpRecord], leaves: Sequence[str]
) -> Fact:
    """Return that a rule has no effect, and why; ``leaves`` are the parameters' paths."""
    rule = rules.rules[index]
    why = _why(index, rule, rules, records, leaves)
    return Code.UNUSED(rule=index, shown=_shown(rule), why=why)


def _shown(rule: QuantizationRule) -> str:
    """Return a rule with the fields that are not the default."""
    fields = [(field.name, getattr(rule, field.name), field.default)
              for field in dataclasses.fields(rule)]  # fmt: skip
    given = ", ".join(f"{name}={value!r}" for name, value, usual in fields if value != usual)
    return f"{type(rule).__name__}({given})"


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
