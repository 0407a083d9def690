"""Rules: derivative rules of functions and HiPrims, with their operations tapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import compat
from ..dataflow.dataflow import Express
from ..dataflow.nodes import Unknown
from ..proxy.array_proxy import Lost
from ..proxy.carrier import proxy_of
from .body_proxies import NO_PROXIES, BodyProxies
from .frames import Frame, Operands, Place
from .hi_prims import Applied, Asked, Rule, TappedPrim, staged_rule
from .numbers import Numbers
from .session import Session


def stage_again(
    session: Session,
    frame: Frame,
    jaxpr: Any,
    consts: Sequence[Any],
    proxies: BodyProxies = NO_PROXIES,
    returns: Sequence[int] = (),
) -> tuple[Any, list[Any], dict[int, Any]]:
    """Stage the re-interpretation of a jaxpr.

    Args:
        session: the call of the wrapped function.
        frame: the jaxpr's frame.
        jaxpr: the jaxpr, open or closed.
        consts: the values of its constants.
        proxies: the array proxies that it takes.
        returns: the results whose array proxies it returns, too, after all results.

    Returns:
        The new open jaxpr, the values of its constants, and the structures of the array proxies
        that it returns, by result. The body of a loop of known length has one more input, the
        last: the number of the step.
    """
    jaxpr = compat.open_of(jaxpr)
    own = [var.aval for var in compat.inputs_of(jaxpr)[len(consts) :]]
    before, after = proxies.avals()
    start, end = len(before), len(before) + len(own)
    number = [compat.typeof(np.int32(0))] if frame.length else []
    returned: dict[int, Any] = {}

    def flat(*args: Any) -> list[Any]:
        if number:
            frame.index, args = args[-1], args[:-1]
        for i, proxy in proxies.inside(args[:start], args[end:]).items():
            frame.proxies[jaxpr.invars[i]] = proxy
        try:
            results = session.reinterpret(frame, jaxpr, [*consts, *args[start:end]])
        finally:
            frame.index = None  # a tracer of the trace that ends here
        for i in returns:
            atom = jaxpr.outvars[i]
            held = None if type(atom) is compat.Literal else proxy_of(frame.proxies.get(atom))
            if held is not None and not isinstance(held, Lost):
                leaves, returned[i] = jax.tree.flatten(held)
                results = [*results, *leaves]
        return results

    info = jaxpr.debug_info._replace(result_paths=None) if returns else jaxpr.debug_info
    new, constants = compat.stage(flat, [*before, *own, *after, *number], info)
    return new, constants, returned


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
    """Return what a derivative rule of a function returns, with its operations tapped.

    Args:
        session: the call of the wrapped function.
        custom: the rule.
        flags: what JAX calls the rule with.
        is_later: whether the loops around have ended.
    """
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
    inner = _rule_frame(opened, custom.place, custom.operands, known, consts, is_later, linear)
    counting = session.counting(custom.numbers.copy())
    return (*stage_again(counting, inner, jaxpr, consts)[:2], *rest)


def _rule_frame(
    jaxpr: Any,
    place: Place,
    operands: Operands,
    sources: Sequence[int | None],
    consts: Sequence[Any],
    is_later: bool = True,
    linear: frozenset[int] = frozenset(),
) -> Frame:
    """Return the frame of a derivative rule that is linear in some of its inputs."""

    def express(var: Any, source: int | None) -> Express:
        if source is None or operands.expressions is None:
            return functools.partial(Unknown, var.aval, "a value of a derivative", None)
        return operands.expressions[source]

    return place.inside(
        jaxpr,
        [None if k is None else operands.origins[k] for k in sources],
        {},
        linear=linear,
        expressions=list(map(express, jaxpr.invars, sources)),
        consts=consts,
        is_rule=True,
        is_later=is_later,
    )


def prim_rule(
    session: Session,
    place: Place,
    operands: Operands,
    numbers: Numbers,
    is_later: bool = True,
    asked: Asked | None = None,
) -> Rule:
    """Return what calls a HiPrim's derivative rule, tapped.

    Args:
        session: the call of the wrapped function.
        place: where the HiPrim's application is.
        operands: what is known of its operands.
        numbers: the numbers from which the rule's operations count.
        is_later: whether the loops around will have ended.
        asked: what came of asking handlers about its expansion, if that stands for it in rules.
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
        inner = _rule_frame(jaxpr, place, operands, places, consts, is_later, along)
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
