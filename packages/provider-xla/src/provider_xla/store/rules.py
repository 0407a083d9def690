"""Rules as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import quant_numerics as qn

from ..rules.rule import QuantizationRule
from .averages import average_json


def rule_json(rule: QuantizationRule) -> dict[str, Any]:
    """Return a rule's class and its non-default fields."""
    given = {
        field.name: getattr(rule, field.name)
        for field in dataclasses.fields(rule)
        if getattr(rule, field.name) != field.default
    }

    def plain(value: Any) -> Any:
        average = isinstance(value, qn.MovingAverage | qn.AmaxHistory)
        return average_json(value) if average else repr(value)

    text = json.dumps({"class": type(rule).__name__, **given}, default=plain, sort_keys=True)
    return json.loads(text)
