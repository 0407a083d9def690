"""Rules: the derivative rules of functions and HiPrims, with their operations tapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import compat
from ..dataflow.dataflow import Express
from ..dataflow.nodes import Unknown
from .frames import Around, Frame, Numbers, Operands
from .hi_prims import Rule, staged_rule
from .session import Session
from .taken import NONE_TAKEN, Taken

Reinterpret = Callable[[Session, Frame, Any, Sequence[Any]], list[Any]]
"""``reinterpret(session, frame, jaxpr, values)``: it needs this module, and so is passed in."""


def stage_again(
    reinterpret: Reinterpret,
    session: Session,
    frame: Frame,
    jaxpr: Any,
    consts: Sequence[Any],
    held: Taken = NONE_TAKEN,
) -> tuple[Any, list[Any]]:
    """Return a jaxpr made of another one and its handlers, and its constants.

    The body of a loop of known length gets one more input, the last: the number of the step.
    """
    jaxpr = compat.open_of(jaxpr)
    own = [var.aval for var in compat.inputs_of(jaxpr)[len(consts) :]]
    before, after = held.avals()
    start, end = len(before), len(before) + len(own)
    number = [compat.typeof(np.int32(0))] if frame.length else []

    def flat(*args: Any) -> list[Any]:
        if number:
            frame.index, args = args[-1], args[:-1]
        for i, proxy in held.inside(args[:start], args[end:]).items():
            frame.proxies[jaxpr.invars[i]] = proxy
        try:
            return reinterpret(session, frame, jaxpr, [*consts, *args[start:end]])
        finally:
            frame.index = None  # of a trace that is over then

    return compat.stage(flat, [*before, *own, *after, *number], jaxpr.debug_info)


def tapped_rule(
    reinterpret: Reinterpret,
    session: Session,
    around: Around,
    rule: Any,
    operands: Operands,
    first: int,
    numbers: Numbers,
) -> Callable[..., tuple]:
    """Return a rule of a function, tapped, whose first arguments are its operands from `first`."""

    @functools.cache
    def tapped(*zeros: Any) -> tuple:
        jaxpr, consts, *rest = rule.call_wrapped(*zeros)
        if not session.tapping.tasks.wants(jaxpr):
            return (jaxpr, consts, *rest)
        opened = compat.open_of(jaxpr)
        # Since 0.11 constants without values are the first arguments.
        before = len(consts) - (len(compat.inputs_of(opened)) - len(opened.invars))
        places = [i - before + first for i in range(len(opened.invars))]
        known = [k if first <= k < len(operands.avals) else None for k in places]
        inner = _rule_frame(opened, around, operands, known, consts)
        counting = session.counting(numbers.copy())
        return (*stage_again(reinterpret, counting, inner, jaxpr, consts), *rest)

    return tapped


def _rule_frame(
    jaxpr: Any,
    around: Around,
    operands: Operands,
    places: Sequence[int | None],
    consts: Sequence[Any],
) -> Frame:
    """Return the frame of a derivative's rule, whose inputs are the operands in these places."""

    def express(var: Any, place: int | None) -> Express:
        if place is None or operands.expressions is None:
            return functools.partial(Unknown, var.aval, "a value of a derivative", None)
        return operands.expressions[place]

    frame = around.frame
    return Frame(
        jaxpr,
        [None if k is None else operands.origins[k] for k in places],
        {},
        frame.own_path(around.scopes),
        frame.label,
        around.within,
        around.untapped,
        frame,
        expressions=list(map(express, jaxpr.invars, places)),
        consts=consts,
        depth=frame.depth,
        is_rule=True,
    )


def prim_rule(
    reinterpret: Reinterpret,
    session: Session,
    around: Around,
    operands: Operands,
    numbers: Numbers,
) -> Rule:
    """Return how to call a derivative rule of a HiPrim with its operations tapped."""

    def rule(fn: Callable[..., Any], first: int, args: tuple) -> Any:
        packed, result, jaxpr, consts = staged_rule(fn, args, session.tapping.run)
        if not session.tapping.tasks.wants(jaxpr):
            return fn(*args)
        leaves = [packed.leaf_of(i) - first for i in range(len(packed.arrays))]
        known = [k if first >= 0 and 0 <= k < len(operands.avals) else None for k in leaves]
        places = [*[None] * (len(jaxpr.invars) - len(known)), *known]
        inner = _rule_frame(jaxpr, around, operands, places, consts)
        counting = session.counting(numbers.copy())
        return result.build(reinterpret(counting, inner, jaxpr, [*consts, *packed.arrays]))

    return rule
