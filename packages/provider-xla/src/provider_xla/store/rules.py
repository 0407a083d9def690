"""Rules, and how static ranges follow from those of steps, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import quant_numerics as qn

from ..extras import feature
from ..rules.qt_rule import QtRule
from ..rules.rule import QuantizationRule


def average_json(average: qn.MovingAverage | qn.AmaxHistory) -> dict[str, Any]:
    """Return an average's, or a history's, fields."""
    return dataclasses.asdict(average)


def average_of(found: Mapping[str, Any]) -> qn.MovingAverage | qn.AmaxHistory:
    """Return what has these fields.

    Raises:
        TypeError, ValueError: nothing has them.
    """
    return qn.AmaxHistory(**found) if "length" in found else qn.MovingAverage(**found)


def rule_json(rule: QuantizationRule) -> dict[str, Any]:
    """Return a rule's class and its non-default fields."""

    def plain(value: Any) -> Any:
        average = isinstance(value, qn.MovingAverage | qn.AmaxHistory)
        return average_json(value) if average else repr(value)

    text = json.dumps({"class": type(rule).__name__, **rule.given}, default=plain, sort_keys=True)
    return json.loads(text)


def rule_of(written: Mapping[str, Any]) -> QuantizationRule:
    """Return the rule that ``rule_json`` wrote.

    Raises:
        UnknownNameError: no plugin has its class.
        MissingExtraError: the package that has it is not installed.
        TypeError, ValueError: its class has no such field or value.
    """
    fields = dict(of_today(written))
    name = fields.pop("class")
    if "static_average" in fields:
        fields["static_average"] = average_of(fields["static_average"])
    known = {cls.__name__: cls for cls in (QuantizationRule, QtRule)}
    # Those of plugins: ``rule-lora`` is LoraRule.
    kind = known.get(name) or feature(f"rule-{name.removesuffix('Rule').lower()}")
    return kind(**fields)


def of_today(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rule of a file as this version writes it: a rank was a field of every rule."""
    is_older = written["class"] == "QuantizationRule" and "rank" in written
    return {**written, "class": "LoraRule"} if is_older else written
