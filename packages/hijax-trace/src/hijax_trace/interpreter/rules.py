"""Rules: derivative rules of functions and HiPrims, with their operations tapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import compat
from .bodies import stage_again
from .frames import FromOperands, Operands, Place
from .hi_prims import Applied, Asked, Rule, TappedPrim, staged_rule
from .op_ids import Numbers
from .session import Session


class CustomRule(NamedTuple):
    """A derivative rule of a function.

    Attributes:
        rule: the rule, as JAX keeps it. Called with a bool for each operand but the constants, it
            returns a jaxpr, the values of its constants, and more.
        place: where the function's call is.
        operands: what is known of the call's operands.
        first: how many of those the rule is not given: the call's constants.
        numbers: the numbers from which the rule's operations count.
    """

    rule: Any
    place: Place
    operands: Operands
    first: int
    numbers: Numbers


def tapped_rule(session: Session, custom: CustomRule) -> Callable[..., tuple]:
    """Return a derivative rule of a function with its operations tapped when JAX needs it."""

    @functools.cache
    def tapped(*flags: Any) -> tuple:
        return tap_rule(session, custom, flags, is_later=True)

    return tapped


def tap_rule(session: Session, custom: CustomRule, flags: Sequence[bool], is_later: bool) -> tuple:
    """Return what a derivative rule of a function returns, with its operations tapped."""
    jaxpr, consts, *rest = custom.rule.call_wrapped(*flags)
    if not session.tapping.tasks.wants(jaxpr):
        return (jaxpr, consts, *rest)
    opened, first = compat.open_of(jaxpr), custom.first
    # Since 0.11 constants without values are the first arguments.
    before = len(consts) - (len(compat.inputs_of(opened)) - len(opened.invars))
    places = [i - before + first for i in range(len(opened.invars))]
    known = [k if first <= k < len(custom.operands.avals) else None for k in places]
    # Its tangents come last.
    linear = frozenset(i for i, k in enumerate(places) if k >= len(custom.operands.avals))
    avals = [var.aval for var in opened.invars]
    given = FromOperands(custom.operands, known, avals, linear)
    inner = custom.place.inside(opened, given, consts=consts, is_rule=True, is_later=is_later)
    counting = session.counting(custom.numbers.copy())
    return (*stage_again(counting, inner, jaxpr, consts)[:2], *rest)


def prim_rule(
    session: Session,
    place: Place,
    operands: Operands,
    numbers: Numbers,
    is_later: bool = True,
    asked: Asked | None = None,
    label: str = "",
) -> Rule:
    """Return what calls a HiPrim's derivative rule, tapped.

    Args:
        session: the call of the wrapped function.
        place: where the HiPrim's application is.
        operands: what is known of its operands.
        numbers: the numbers from which the rule's operations count.
        is_later: whether the loops around will have ended.
        asked: what came of asking handlers about its expansion, if that stands for it in rules.
        label: the label of its operations in op ids; "" for that of the place.
    """

    def rule(
        fn: Callable[..., Any],
        first: int,
        args: tuple,
        linear: int,
        tapped: TappedPrim | None = None,
        extra: tuple[Any, ...] = (),
    ) -> Any:
        packed, result, jaxpr, consts = staged_rule(fn, args, session.tapping.run)
        if not session.tapping.tasks.wants(jaxpr):
            return fn(*args)
        leaves = [packed.leaf_of(i) for i in range(len(packed.arrays))]
        own = range(first, first + len(operands.avals)) if first >= 0 else ()
        known = [leaf - first if leaf in own else None for leaf in leaves]
        before = len(jaxpr.invars) - len(known)
        places = [*[None] * before, *known]
        tangents = len(jax.tree.leaves(args)) - linear
        along = frozenset(before + i for i, leaf in enumerate(leaves) if leaf >= tangents)
        given = FromOperands(operands, places, [var.aval for var in jaxpr.invars], along)
        known = {"consts": consts, "is_rule": True, "is_later": is_later}
        inner = place.inside(jaxpr, given, label=label, **known)
        start = numbers
        if tapped is not None and asked is not None:
            given = [packed.place_of(leaf) for leaf in own]
            variables = [None if i is None else jaxpr.invars[before + i] for i in given]
            applied = Applied(tapped, extra, variables, asked)
            if any(map(applied.is_by, jaxpr.eqns)):
                inner.applied, start = applied, asked.numbers
        counting = session.counting(start.copy())
        return result.build(counting.reinterpret(inner, jaxpr, [*consts, *packed.arrays]))

    return rule
