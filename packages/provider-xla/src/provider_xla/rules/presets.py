"""Presets: rules by name, in one table."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import quant_numerics as qn

from ..errors import QuantizationError
from ..extras import MissingExtraError
from .qt_rule import QtRule
from .rule import QuantizationRule
from .written import Q, Rule, is_qwix, of_qwix

_BLOCKS = Q("int4", tile=32, scales="float16")


class Preset(NamedTuple):
    """A rule for all operations.

    Attributes:
        about: what it is for, in a line.
        made: the rule, or what makes it where that needs another package.
        cosine: of the embeddings of MiniLM, a sentence encoder, to those in float: the mean of 52
            sentences, as tests/test_minilm.py measures it. None where training changes it.
    """

    about: str
    made: QuantizationRule | Callable[[], QuantizationRule]
    cosine: float | None = None

    @property
    def rule(self) -> QuantizationRule:
        """The rule.

        Raises:
            MissingExtraError: it needs a package that is not installed.
        """
        return self.made if isinstance(self.made, QuantizationRule) else self.made()


PRESETS: Mapping[str, Preset] = {
    "int8": Preset("weights in int8: decoding, and models that int8 activations hurt",
                   Rule(weight="int8"), 0.999),
    "int4": Preset("weights in int4, a scale for 32: decoding", Rule(weight=_BLOCKS), 0.946),
    "w8a8": Preset("weights and activations in int8: encoders, prefill, CNNs",
                   Rule(weight="int8", act="int8"), 0.996),
    "w4a8": Preset("weights in int4, activations in int8, a scale for 32: language models",
                   Rule(weight=_BLOCKS, act="int8"), 0.946),
    "nf4": Preset("weights in nf4, a scale for 64: small files, QLoRA's base",
                  Rule(weight=Q("nf4", tile=64)), 0.963),
    "fp8": Preset("weights and activations in float8_e4m3fn: GPUs with FP8",
                  Rule(weight="float8_e4m3fn", act="float8_e4m3fn"), 0.997),
    "mxfp4": Preset("weights in mxfp4, a scale for 32", Rule(weight="mxfp4"), 0.948),
    "mxfp8": Preset("weights and activations in mxfp8, a scale for 32",
                    Rule(weight="mxfp8", act="mxfp8"), 0.994),
    "qlora": Preset("weights in nf4, and float adapters of rank 8 to train",
                    lambda: Rule(weight=Q("nf4", tile=64), lora=8)),
    "qat-w8a8": Preset("training that sees int8 weights and activations: w8a8 afterwards",
                       QtRule.of(Rule(weight="int8", act="int8"))),
    "qat-int4": Preset("training that sees int4 weights: int4 afterwards",
                       QtRule.of(Rule(weight=_BLOCKS))),
    "train-int8": Preset("training with int8 matmuls, forward and backward",
                         Rule(weight="int8", act="int8", gradient="int8")),
    "train-fp8": Preset("training with float8 matmuls, E4M3 forward and E5M2 backward",
                        Rule(weight="float8_e4m3fn", act="float8_e4m3fn", gradient="float8_e5m2")),
}  # fmt: skip
"""By name. ``"int4/64"`` is the preset with a scale for 64."""

_WITH_TILE = re.compile(r"([^/]+)/(\d+)")


def preset(name: str) -> QuantizationRule:
    """Return the rule of a preset.

    Args:
        name: one of ``PRESETS``; of those with tiles also with the number of elements that share
            a scale, such as ``"w4a8/64"``.

    Raises:
        QuantizationError: there is no such preset; gives the nearest, and all.
    """
    found = _WITH_TILE.fullmatch(name)
    base, tile = found.groups() if found else (name, None)
    known = PRESETS.get(base)
    if known is None:
        near = difflib.get_close_matches(base.lower(), PRESETS, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise QuantizationError(
            f"A preset must be one of {', '.join(PRESETS)}, got {name!r}.{guess} Or give rules, "
            "such as Rule(weight='int8')."
        )
    rule = known.rule
    if tile is None:
        return rule
    if rule.tile_size is None or int(tile) < 1:
        tiled = [one for one, (_, rule, _) in installed().items() if rule.tile_size is not None]
        raise QuantizationError(
            f"A number of elements per scale is for {', '.join(tiled)}, got {name!r}."
        )
    return dataclasses.replace(rule, tile_size=int(tile))


def installed() -> dict[str, tuple[str, QuantizationRule, float | None]]:
    """Return what presets do, their rules and cosines: those whose packages are installed."""
    found = {}
    for name, one in PRESETS.items():
        with contextlib.suppress(MissingExtraError):
            found[name] = one.about, one.rule, one.cosine
    return found


def is_of_feature(rule: Any) -> bool:
    """Return whether a rule is a feature's, as ``CacheRule``: its class names the feature."""
    return isinstance(getattr(type(rule), "feature", None), str)


def as_rules(given: Any) -> list[Any]:
    """Return rules: from one, a preset's name, a rule of Qwix, or several of these."""
    single = isinstance(given, (str, Mapping, QuantizationRule)) or is_qwix(given)
    single = single or is_of_feature(given) or not isinstance(given, Iterable)
    rules = []
    for rule in (given,) if single else given:
        if isinstance(rule, str):
            rules.append(preset(rule))
        elif is_qwix(rule):
            rules.append(of_qwix(rule))
        elif isinstance(rule, QuantizationRule) or is_of_feature(rule):
            rules.append(rule)
        else:
            raise TypeError(
                f"A provider takes QuantizationRules and names of presets, got {rule!r}. Write "
                "for example QuantizationRule(weight_qtype='int8', act_qtype='int8')."
            )
    return rules


def bits_of(rule: QuantizationRule) -> float:
    """Return the bits that a rule's format takes for a number of a matrix of 1,024 rows."""
    kind = qn.get_qtype(rule.weight_qtype)
    scales = kind if rule.scale_dtype is None else kind.with_scales(rule.scale_dtype)
    size = rule.tile_size or kind.block or 1024
    size = size if isinstance(size, int) else math.ceil(1024 * size)
    return kind.bits + scales.scale_dtype.itemsize * 8 / size
