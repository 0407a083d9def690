"""Rules as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ..rules.rule import QuantizationRule


def rule_json(rule: QuantizationRule) -> dict[str, Any]:
    """Return a rule's class and its non-default fields."""
    given = {
        field.name: getattr(rule, field.name)
        for field in dataclasses.fields(rule)
        if getattr(rule, field.name) != field.default
    }
    text = json.dumps({"class": type(rule).__name__, **given}, default=repr, sort_keys=True)
    return json.loads(text)
