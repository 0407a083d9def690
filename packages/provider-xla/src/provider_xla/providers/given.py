"""Providers of rules, and what presets do here."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from interception_core import Provider

from ..rules.qt_rule import QtRule
from ..rules.written import as_rules, bits_of, installed
from ..tables import table
from .provider import PtqProvider
from .qt import QtProvider


def provider_of(given: Any) -> Any:
    """Return a provider as it is, or that of a preset or rules: to train with a ``QtRule``."""
    if isinstance(given, Provider):
        return given
    try:
        rules = as_rules(given)
    except TypeError as error:
        raise TypeError(
            "A model takes a provider, such as "
            "PtqProvider(QuantizationRule(weight_qtype='int8')): an object with engine, "
            "disable_jit, interceptor() and apply(fn); or rules, or the name of a preset. Got "
            f"{given!r}."
        ) from error
    return (QtProvider if any(isinstance(one, QtRule) for one in rules) else PtqProvider)(rules)


class PresetRow(NamedTuple):
    """What a preset does on this machine.

    Attributes:
        name: of the preset.
        about: what it is for.
        bytes_per_weight: of a matrix with 1,024 rows, scales included.
        runs: the FFI target that multiplies one row with it, "XLA", or "training".
        cosine: of the embeddings of a sentence encoder to those in float; None if it trains.
    """

    name: str
    about: str
    bytes_per_weight: float
    runs: str
    cosine: float | None


class Presets(tuple[PresetRow, ...]):
    """All presets. ``print`` shows a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [
            (
                one.name,
                f"{one.bytes_per_weight:.2f}",
                "" if one.cosine is None else f"{one.cosine:.3f}",
                one.runs,
                one.about,
            )
            for one in self
        ]
        headers = ["preset", "bytes a weight", "cosine", "one row runs in", "for"]
        return (
            f"{table(rows, headers, right=(1, 2))}\n\ncosine: of the embeddings of a sentence "
            "encoder (MiniLM) to those in float, the mean of 52 sentences. docs/choose.md has more "
            "models."
        )


def presets() -> Presets:
    """Return what each preset does, its bytes and its kernel on this machine.

    Presets of packages that are not installed are left out.
    """
    known = installed()
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((1, 1024), jnp.float32)

    def row(name: str) -> PresetRow:
        about, rule, cosine = known[name]
        runs = "training"
        if not isinstance(rule, QtRule):
            (op,) = PtqProvider(rule).plan(lambda w, x: x @ w, w, x).ops
            runs = next((one.kernel for one in op.kernels.values()), None) or "XLA"
        return PresetRow(name, about, bits_of(rule) / 8, runs, cosine)

    return Presets(map(row, known))
