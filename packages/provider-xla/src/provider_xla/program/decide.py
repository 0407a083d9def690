"""Decide: how an operation is quantized, found once for equal operations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import quant_numerics as qn

from ..rules.rule import QuantizationRule
from .contractions import Contraction
from .granularity import fitted, misfit
from .matching import Rules, Weight
from .ops import Reading, TappedOp


class Decision(NamedTuple):
    """What a rule says about a contraction.

    Attributes:
        hows: how each operand is quantized; None where it stays float.
        remarks: what is done that the rule does not say.
        why: why the operation stays float; None if it does not.
        wrong: whether its rule forbids that.
    """

    hows: tuple[qn.HowToQuantize | None, ...]
    remarks: tuple[str, ...]
    why: str | None
    wrong: bool


class Readings:
    """Read calls and decide about them. Calls of equal types are read once."""

    def __init__(self, rules: Rules):
        self._rules = rules
        self._kept: dict[Hashable, tuple[Contraction, tuple[int, ...], dict[Any, Decision]]] = {}

    def read(
        self, op: TappedOp, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[Reading, dict[Any, Decision]]:
        """Return a call as a contraction, and the decisions about such calls so far.

        Raises:
            StaysFloat: the call is not a contraction.
        """
        values = (*args, *kwargs.values())
        key = _key(op, args, kwargs)
        kept = None if key is None else self._kept.get(key)
        if kept is not None:
            contraction, places, decisions = kept
            lhs, rhs, *extras = (values[i] for i in places)
            return Reading(contraction, (lhs, rhs), tuple(extras)), decisions
        reading, decisions = op.read(args, kwargs), {}
        if key is not None:
            arrays = [(id(x), i) for i, x in enumerate(values) if isinstance(x, jax.Array)]
            place = dict(arrays)
            places = [place.get(id(x)) for x in (*reading.operands, *reading.extras)]
            # An array that is given twice has two places, of which its id tells one.
            if None not in places and len(place) == len(arrays):
                self._kept[key] = reading.contraction, tuple(places), decisions  # type: ignore[arg-type]
        return reading, decisions

    def decide(
        self,
        index: int,
        reading: Reading,
        weights: Sequence[Weight | None],
        decisions: dict[Any, Decision],
    ) -> Decision:
        """Return what a rule says about a contraction.

        Args:
            index: the number of the rule.
            reading: the contraction and its operands.
            weights: the weight that each operand is; None for activations.
            decisions: the decisions so far, from ``read``.
        """
        sides = tuple(weight is not None for weight in weights)
        found = decisions.get((index, sides))
        if found is None:
            found = decisions[index, sides] = self._decide(index, reading, sides)
        return found

    def _decide(self, index: int, reading: Reading, sides: Sequence[bool]) -> Decision:
        rule = self._rules.rules[index]
        shapes = [operand.shape for operand in reading.operands]
        hows = tuple(self._rules.how(rule, is_weight) for is_weight in sides)
        hows, remarks = _fitted(rule, reading.contraction, shapes, hows)
        why, wrong = None, False
        # A parameter that stays float may still have an adapter.
        if any(hows) or rule.rank is None or not any(sides):
            why, wrong = _why_not(rule, reading.contraction, shapes, hows)
        return Decision(hows, remarks, why, wrong)


def _key(op: TappedOp, args: tuple, kwargs: Mapping[str, Any]) -> Hashable:
    """Return what a call's reading depends on, or None if that is not known."""
    parts: list[Any] = [op.name, op.reader, jax.config.jax_numpy_dtype_promotion, *kwargs]  # pyrefly: ignore
    for value in (*args, *kwargs.values()):
        if isinstance(value, jax.Array):
            parts.append(jax.typeof(value))
        elif isinstance(value, _PLAIN):
            parts.append(value)
        else:
            return None
    key = (len(args), *parts)
    try:
        hash(key)
    except TypeError:  # a tuple of lists
        return None
    return key


_PLAIN = (type(None), str, int, tuple, type, np.dtype, jax.lax.Precision)
"""Types of arguments that a reading may depend on, if they can be hashed."""


def _fitted(
    rule: QuantizationRule,
    contraction: Contraction,
    shapes: Sequence[tuple[int, ...]],
    hows: tuple[qn.HowToQuantize | None, ...],
) -> tuple[tuple[qn.HowToQuantize | None, ...], tuple[str, ...]]:
    """Return how operands are quantized, with tiles that their contracted axis has."""
    sizes = contraction.tiled_sizes(shapes, hows)
    tiled = [how for how in hows if how]
    found = {how: fitted(how, sizes, rule.tile_fallback) for how in tiled}
    # Both sides have the same tiles, those of a format with blocks.
    blocks = any(qn.get_qtype(how.qtype).block is not None for how in tiled)
    if blocks and any(new is not how for how, (new, _) in found.items()):
        return hows, ()
    remarks = tuple(dict.fromkeys(text for _, text in found.values() if text))
    return tuple(how and found[how][0] for how in hows), remarks


def _why_not(
    rule: QuantizationRule,
    contraction: Contraction,
    shapes: Sequence[tuple[int, ...]],
    hows: Sequence[Any],
) -> tuple[str | None, bool]:
    """Return why an operation stays float, and if its rule forbids that."""
    if not any(hows):
        if rule.weight_qtype is None and rule.rank is None:
            return "the rule leaves it float", False
        return "the rule is for weights, and no operand is known as a parameter", False
    sizes = contraction.tiled_sizes(shapes, hows)
    tiles = {how.tile_size for how in hows if how is not None}
    for tile in sorted(tiles - {None}):
        reason = misfit(sizes, tile, rule.tile_fallback)
        if reason is not None:
            return reason, True
    return None, False
