"""Rules that were written for Qwix (google/qwix), with the meaning that they have there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..extras import feature
from .qt_rule import QtRule
from .rule import QuantizationRule


def is_qwix(rule: Any) -> bool:
    """Return whether an object is a rule of Qwix."""
    kinds = type(rule).__mro__
    is_theirs = any(kind.__module__.partition(".")[0] == "qwix" for kind in kinds)
    return is_theirs and dataclasses.is_dataclass(rule)


def of_qwix(rule: Any) -> QuantizationRule:
    """Return a rule of Qwix as a ``QuantizationRule``, ``QtRule`` or ``LoraRule``.

    Fields have the same names and meaning, but that Qwix also quantizes matmuls of two activations
    if the rule has no ``op_names``, and that ``"dot_general"`` is what ``@``, ``jnp.matmul`` and
    ``jnp.dot`` come down to.

    Raises:
        ValueError: it has a field that rules do not have here; names the field.
        MissingExtraError: it is a ``LoraRule``, and provider-xla-lora is not installed.
    """
    # What Qwix has by default may be written differently here, and is the default here, too.
    given = {
        field.name: value
        for field in dataclasses.fields(rule)
        if (value := getattr(rule, field.name)) != _default(field)
    }
    for kind in (feature("rule-lora"),) if "rank" in given else (QuantizationRule, QtRule):
        known = {field.name for field in dataclasses.fields(kind)}
        if given.keys() <= known:
            break
    else:
        names = ", ".join(sorted(given.keys() - known))
        raise ValueError(
            f"A rule of Qwix must have fields that {kind.__name__} has, got {names}. Write it as a "
            f"{kind.__name__}: docs/quantization.md lists what differs."
        )
    return kind(**in_qwix_words(given))


def in_qwix_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rule here for those of one of Qwix, with the meaning there."""
    found = dict(given)
    if "dot_general" in (found.get("op_names") or ()):
        found["op_names"] = {*found["op_names"], "dot", "matmul"}
    if found.get("act_qtype") is not None and not found.get("op_names"):
        found["weights_only"] = False
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
