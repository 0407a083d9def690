"""Rules: derivative rules of HiPrims, with their operations tapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .. import compat
from ..staging.packed import Packed, stage_packed
from .hi_prims import Applied, Rule, TappedPrim
from .op_ids import Numbers, OfRule
from .questions import Outcome
from .session import Around


def of_rule(around: Around, name: str) -> OfRule:
    """Return which operations of a rule are those of its function, which was tapped just now.

    Args:
        around: what is around the function's call.
        name: tells the rule of which function it is.
    """
    session, (frame, scopes, *_), _ = around
    ends = session.numbers.copy()
    number = session.numbers.next(frame.path(scopes), frame.label, name)
    return OfRule(f"{name}{number or ''}", ends)


def prim_rule(
    around: Around,
    numbers: Numbers,
    is_later: bool = True,
    asked: tuple[Numbers, Outcome] | None = None,
    label: str = "",
    of: OfRule | None = None,
) -> Rule:
    """Return what calls a HiPrim's derivative rule, tapped.

    Args:
        numbers: the numbers from which the rule's operations count.
        is_later: whether the loops around will have ended.
        asked: the operations so far, after those of its expansion, and what came of asking handlers
            about them, if that stands for it in rules.
        label: the label of its operations in op ids; "" for that of the place.
        of: which of its operations are those of its function; None if none is.
    """
    session, place, operands = around

    def rule(
        fn: Callable[..., Any],
        first: int,
        args: tuple,
        linear: int,
        tapped: TappedPrim | None = None,
        extra: tuple[Any, ...] = (),
    ) -> Any:
        packed, run = Packed(args, ()), session.tapping.run
        name, types = getattr(fn, "__name__", "rule"), list(map(compat.typeof, packed.arrays))
        jaxpr, consts, result = stage_packed(
            name, lambda arrays: run(fn, packed.build(arrays)), types
        )
        if not session.tapping.tasks.wants(jaxpr):
            return fn(*args)
        leaves = [packed.leaf_of(i) for i in range(len(packed.arrays))]
        own = range(first, first + len(operands.avals)) if first >= 0 else ()
        known = [leaf - first if leaf in own else None for leaf in leaves]
        before = len(jaxpr.invars) - len(known)
        places = [*[None] * before, *known]
        tangents = len(jax.tree.leaves(args)) - linear
        along = frozenset(before + i for i, leaf in enumerate(leaves) if leaf >= tangents)
        given = operands.inside(places, [var.aval for var in jaxpr.invars], along)
        known = {"consts": consts, "is_rule": True, "is_later": is_later}
        inner = place.inside(jaxpr, given, label=label, **known)
        start = numbers
        if tapped is not None and asked is not None:
            given = [packed.place_of(leaf) for leaf in own]
            variables = [None if i is None else jaxpr.invars[before + i] for i in given]
            applied = Applied(tapped, extra, variables, asked[1])
            if any(map(applied.is_by, jaxpr.eqns)):
                inner.applied, start = applied, asked[0]
        # What one rule of a HiPrim has counted, the others do not know.
        own = of if of is None or asked is None else of._replace(label=f"{of.label}.{name}")
        counting = session.counting(start.copy(), own)
        return result.build(counting.reinterpret(inner, jaxpr, [*consts, *packed.arrays]))

    return rule
