"""HiPrims: operations that expand to others, entered like jitted functions.

``Expansions`` stages what a HiPrim expands to, with targets as markers, so that it can be
re-interpreted. ``TappedPrim`` expands to the result. Its other rules are the HiPrim's, run with
their operations tapped: see ``rules``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from interception_core import JaxtapError

from .. import compat
from ..dataflow.holders import SAME, Body, Holder
from ..hi.mapped_prim import MappedPrim, mapped
from .questions import Outcome

Run = Callable[[Callable[..., Any], tuple], Any]
"""Calls a function with a tuple of arguments, while the targets are tapped."""
Rule = Callable[..., Any]
"""``rule(fn, first, args, linear, tapped, extra)`` calls a rule with its operations tapped. The
leaves of ``args`` from ``first`` on are the HiPrim's operands; it is linear in the last ``linear``
leaves. If there is ``tapped``, the ``TappedPrim`` of ``extra`` and those operands stands for the
HiPrim where the rule applies it to them."""


class Expansion:
    """What a HiPrim expands to.

    Attributes:
        jaxpr: closed. Its inputs are the arrays that the operands consist of.
    """

    def __init__(self, prim: Any, run: Run):
        avals = [lo for aval in prim.in_avals_flat for lo in compat.lo_types(aval)]
        expand = functools.partial(run, prim.expand)
        flat = functools.partial(_expanded, prim, lambda *args: expand(args))
        info = compat.named_info(type(prim).__name__)
        self.jaxpr = compat.with_consts(*compat.stage(flat, avals, info))
        # The arrays of an operand of a high-level type are not operands of the equation.
        self._inputs = tuple(
            None if aval.is_high else i
            for i, aval in enumerate(prim.in_avals_flat)
            for _ in compat.lo_types(aval)
        )
        self._results = "carry" if any(aval.is_high for aval in prim.out_avals_flat) else "same"

    def holder(self) -> Holder:
        """Return the holder of the HiPrim's application."""
        body = Body(self.jaxpr, self._inputs, (SAME,) * len(self._inputs))
        return Holder(
            lambda params, operands: [body],
            lambda params, jaxprs, extra: params,  # ``rebuild`` makes a TappedPrim instead
            results=self._results,
        )


def _expanded(prim: Any, expand: Callable[..., Any], *arrays: Any) -> list[Any]:
    """Return the arrays of the results, from the arrays of the operands."""
    values = _raised(prim.in_avals_flat, arrays)
    results = prim.out_tree.flatten_up_to(expand(*jax.tree.unflatten(prim.in_tree, values)))
    return _lowered(prim.out_avals_flat, results)


def _raised(avals: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Return the values of types that consist of arrays."""
    given = iter(arrays)
    counts = (len(compat.lo_types(aval)) for aval in avals)
    parts = [list(itertools.islice(given, count)) for count in counts]
    return list(map(compat.raised, avals, parts))


def _lowered(avals: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the arrays that values consist of."""
    pairs = zip(avals, values, strict=True)
    return [array for aval, value in pairs for array in compat.lowered(aval, value)]


class Expansions:
    """What HiPrims expand to, each staged once."""

    def __init__(self, run: Run):
        self._run = run
        # By identity: equal HiPrims may have operands of different types.
        self._known: dict[int, tuple[weakref.ref[Any], Expansion | None]] = {}

    def of(self, prim: Any) -> Expansion | None:
        """Return what a HiPrim expands to, or None."""
        number = id(prim)
        if number not in self._known:
            forget = functools.partial(_forget, weakref.ref(self), number)
            found = Expansion(prim, self._run) if _can_expand(prim) else None
            self._known[number] = weakref.ref(prim, forget), found
        return self._known[number][1]

    def forget(self, number: int) -> None:
        """Forget the HiPrim of an ``id``, when it is deleted."""
        del self._known[number]


def _forget(expansions: weakref.ref[Expansions], number: int, _: Any) -> None:
    known = expansions()
    if known is not None:
        known.forget(number)


def _can_expand(prim: Any) -> bool:
    # Of a function with custom rules the rules are tapped, too; see ``custom``.
    if compat.is_custom_prim(prim):
        return False
    # custom_root's linear map is a derivative that JAX made, not a part of the program.
    if not compat.expands(prim) or type(prim) in (TappedPrim, MappedPrim, compat.ROOT_DERIVATIVE):
        return False
    avals = [*prim.in_avals_flat, *prim.out_avals_flat]
    if any(map(compat.is_changeable, avals)):
        return False
    return not (prim.effects and any(aval.is_high for aval in avals))


class TappedPrim(compat.HiPrimBase):
    """A HiPrim with its operations tapped.

    Args:
        jaxpr: what it expands to. Its first inputs are the new operands.
        extra: how many new operands there are.
    """

    prim: Any

    def __init__(self, prim: Any, jaxpr: Any, extra: int, rule: Rule):
        jaxpr_avals = [var.aval for var in compat.open_of(jaxpr).invars[:extra]]
        self.in_avals = (tuple(jaxpr_avals), *prim.in_avals)
        self.out_aval = prim.out_aval
        self.effects = compat.positional_effects(jaxpr)
        self.skip_linearization_on_zero_tangents = getattr(
            prim, "skip_linearization_on_zero_tangents", False
        )
        self.params = {"prim": prim, "_program": _Program(jaxpr, rule)}
        super().__init__()

    def expand(self, extra: tuple[Any, ...], *args: Any) -> Any:
        prim = self.prim
        arrays = _lowered(prim.in_avals_flat, prim.in_tree.flatten_up_to(args))
        found = compat.as_function(self._program.jaxpr)(*extra, *arrays)
        return jax.tree.unflatten(self.out_tree, _raised(prim.out_avals_flat, found))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        if any(not isinstance(tangent, compat.Zero) for tangent in tangents[0]):
            refuse()
        args = primals[1:], tangents[1:]
        linear = len(jax.tree.leaves(args[1]))
        return self._program.rule(self.prim.jvp, 0, args, linear, self, primals[0])

    def lin(self, nzs_in: Any, *primals: Any) -> Any:
        return self._forward(self.prim.lin, nzs_in, primals)

    def vjp_fwd(self, nzs_in: Any, *primals: Any) -> Any:
        return self._forward(self.prim.vjp_fwd, nzs_in, primals)

    def _forward(self, fn: Callable[..., Any], nzs_in: Any, primals: tuple) -> Any:
        if any(nzs_in[0]):
            refuse()
        args, first = (nzs_in[1:], *primals[1:]), len(self.prim.in_avals_flat)
        return self._program.rule(fn, first, args, 0, self, primals[0])

    def linearized(self, *given: Any) -> Any:
        places = len(self.in_avals)
        residuals, tangents = given[:-places], given[-places + 1 :]
        return self._linearized(*residuals, *tangents)

    def _linearized(self, *given: Any) -> Any:
        tangents = len(jax.tree.leaves(given[-len(self.prim.in_avals) :]))
        return self._program.rule(self.prim.linearized, -1, given, tangents)

    def vjp_bwd(self, *given: Any) -> Any:
        places = len(self.in_avals)
        residuals, accums = given[:-places], given[-places + 1 :]
        # A backward rule may transpose ``linearized``, whose operations are tapped, too.
        prim = copy.copy(self.prim)
        prim.linearized = self._linearized
        return prim.vjp_bwd(*residuals, *accums)

    def transpose(self, out_ct: Any, *maybe_accums: Any) -> Any:
        return self.prim.transpose(out_ct, *maybe_accums[1:])

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return mapped(self, axis_data, args, dims)


class Applied(NamedTuple):
    """The application of a HiPrim whose rule runs.

    A rule often applies the HiPrim itself, for the result beside the derivative. That is the
    operation that handlers were asked about: they are not asked twice, and what they used from
    around it was made an operand, which outlives the trace.

    Attributes:
        tapped: the HiPrim with its operations tapped.
        extra: the values of its additional operands.
        variables: the operands of the HiPrim, as the rule has them; None for one that it has not.
        outcome: what came of asking.
    """

    tapped: TappedPrim
    extra: tuple[Any, ...]
    variables: Sequence[Any]
    outcome: Outcome

    def is_by(self, eqn: Any) -> bool:
        """Return whether an equation applies the HiPrim to its operands."""
        if eqn.primitive is not compat.call_hi_primitive_p:
            return False
        own, prim = self.tapped.prim, eqn.params["_prim"]
        # Equal HiPrims may have operands of different types, but variables have one type each.
        same = len(eqn.invars) == len(self.variables) and all(
            map(operator.is_, eqn.invars, self.variables)
        )
        return same and (prim is own or prim == own)


def refuse() -> None:
    """Raise JaxtapError: a handler's value that a rule knows nothing of is differentiated."""
    raise JaxtapError(
        "A handler must use only its arguments and values without derivatives in a function "
        "with custom derivative rules or a HiPrim, got a value from around it that is "
        "differentiated. Use jax.lax.stop_gradient(value), or tap the function as a whole."
    )


class _Program:
    """A tapped HiPrim's expansion and rules, compared by identity."""

    def __init__(self, jaxpr: Any, rule: Rule):
        self.jaxpr = jaxpr
        self.rule = rule
