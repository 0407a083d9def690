"""Custom: calls with custom derivative rules, with all of it tapped.

A rule runs instead of the function, when JAX gets to it: its operations count from where the
function's do. By then the loops around have ended, and with them the tracers of their bodies. So if
handlers use values from around the call, such as the number of a loop's step or the contents of a
Box, the rule is staged with the function, and the values become operands of the call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import compat
from ..dataflow.holders import SAME, Body, custom_body
from ..staging.deferred import Staged
from ..staging.marker import hoisted
from ..staging.packed import stage_packed
from .bodies import proxies_of_body, stage_again, tap_body, untrained
from .entering import Rebuilt, emit, share
from .hi_prims import refuse
from .one_pass import Pass
from .op_ids import OfRule
from .rules import of_rule, prim_rule
from .session import Around
from .tasks import Task


def enter_custom(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Make a call with custom derivative rules, with all of it tapped."""
    eqn = task.eqn
    new = rebuild_custom(run.around(task), eqn.params, values)
    emit(run, task, eqn, new, info)


def rebuild_custom(around: Around, params: dict[str, Any], values: Sequence[Any]) -> Rebuilt:
    """Return a call with custom derivative rules, with all of it tapped."""
    kind = _HiPrim if "_prim" in params else _Primitive
    call, frame = kind(around, params), around.place.frame
    body = call.body
    taken = proxies_of_body(body, untrained(around.operands.proxies))
    tapped = tap_body(around, body, taken)
    call.of = of_rule(around, f"{_name(body.jaxpr, call.is_jvp)}.{'jvp' if call.is_jvp else 'fwd'}")
    jaxpr = tapped.jaxpr
    leading = (*tapped.extra, *(taken.leading if tapped.takes_proxies else ()))
    backward = None
    if frame.is_derived:
        backward = functools.partial(_backward, around, body.jaxpr)
    staged = None
    # With symbolic zeros a rule differs by call. A rule often calls its function: that would have
    # no end.
    if tapped.extra and not call.symbolic_zeros and not frame.is_rule:
        with contextlib.suppress(Exception):  # what it raises matters where it is used
            staged = call.stage()
    if staged is not None and staged.more:
        (jaxpr, rule), leading = share([jaxpr, staged.jaxpr], [leading, staged.more])
        staged = staged._replace(jaxpr=rule)
    else:
        staged = None
    made = call.made(jaxpr, leading, backward, staged)
    return Rebuilt(made, [*leading, *values], tapped.outcome)


Backward = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a backward rule, tapped."""


def _backward(around: Around, jaxpr: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward rule, tapped, of a call that the program differentiates.

    JAX runs it in the transpose of what is around the call, when operations after the call have
    been counted. So its operations have another label, which tells the call.

    Args:
        rule: the rule, called with residuals and cotangents.
    """
    session, place, _ = around
    frame, own = place.frame, f"{_name(jaxpr, is_jvp=False)}.bwd"
    number = session.numbers.next(frame.path(place.scopes), frame.label, own)
    label = ".".join(filter(None, (frame.label, f"{own}{number or ''}")))
    tapped = prim_rule(around, session.numbers.copy(), label=label)
    return lambda *args: tapped(rule, -1, args, 0)


def _name(jaxpr: Any, is_jvp: bool) -> str:
    """Return what labels call a function with custom rules, such as ``custom_jvp(f)``."""
    return f"custom_{'jvp' if is_jvp else 'vjp'}({compat.label(jaxpr).partition('(')[2]}"


class _Primitive:
    """A call that is an equation of ``custom_jvp_call`` or ``custom_vjp_call``.

    Attributes:
        body: the function.
        is_jvp: whether it has a rule of ``custom_jvp``, or those of ``custom_vjp``.
        of: which operations of its rule are the function's; known when that has been tapped.
        symbolic_zeros: whether its rule is told which tangents are zero.
    """

    def __init__(self, around: Around, params: dict[str, Any]):
        session, self._place, operands = around
        self._session, self._operands, self._params = session, operands, params
        self.is_jvp = "jvp_jaxpr_fun" in params
        self._name = "jvp_jaxpr_fun" if self.is_jvp else "fwd_jaxpr_thunk"
        # The rule is not given the call's constants, its first operands.
        self._first, count = params["num_consts"], len(operands.avals)
        self._numbers = session.numbers.copy()  # the rule's operations count from where these do
        self.of: OfRule | None = None
        self.body = Body(params["call_jaxpr"], tuple(range(count)), (SAME,) * count)
        self.symbolic_zeros = params["symbolic_zeros"]

    def stage(self) -> Staged:
        """Stage the rule with the function."""
        flags = [not self.is_jvp] * (len(self._operands.avals) - self._first)
        jaxpr, consts, *rest = self._tapped(flags, is_later=False)
        jaxpr, extra = hoisted(compat.open_of(jaxpr), list(consts))
        return Staged(jaxpr, extra, rest)

    def _tapped(self, flags: Sequence[bool], is_later: bool) -> tuple:
        """Return what the rule returns, with its operations tapped.

        JAX calls a rule with a bool for each operand but the constants. It returns a jaxpr, the
        values of its constants, and more.
        """
        session, first, operands = self._session, self._first, self._operands
        jaxpr, consts, *rest = self._params[self._name].call_wrapped(*flags)
        if not session.tapping.tasks.wants(jaxpr):
            return (jaxpr, consts, *rest)
        opened = compat.open_of(jaxpr)
        # Since 0.11 constants without values are the first arguments.
        before = len(consts) - (len(compat.inputs_of(opened)) - len(opened.invars))
        places = [i - before + first for i in range(len(opened.invars))]
        known = [k if first <= k < len(operands.avals) else None for k in places]
        # Its tangents come last.
        linear = frozenset(i for i, k in enumerate(places) if k >= len(operands.avals))
        given = operands.inside(known, [var.aval for var in opened.invars], linear)
        how = {"consts": consts, "is_rule": True, "is_later": is_later}
        inner = self._place.inside(opened, given, **how)
        counting = session.counting(self._numbers.copy(), self.of)
        return (*stage_again(counting, inner, jaxpr, consts)[:2], *rest)

    def made(
        self,
        jaxpr: Any,
        leading: Sequence[Any],
        backward: Backward | None,
        staged: Staged | None,
    ) -> dict[str, Any]:
        """Return the parameters of the call of ``jaxpr``, which has more leading operands.

        Without a staged rule the rule is tapped when JAX needs it.
        """
        new, name = {**self._params, "call_jaxpr": jaxpr}, self._name
        if backward is not None and "bwd" in new:
            new["bwd"] = compat.rule_like(new["bwd"], backward)
        if staged is None:
            rule = functools.cache(lambda *flags: self._tapped(flags, is_later=True))
            new["num_consts"] = self._first + len(leading)
        else:
            hidden = len(leading), self._first
            avals = [*map(compat.typeof, leading), *self._operands.avals]
            rule = (_jvp_of if self.is_jvp else _fwd_of)(staged, hidden, avals)
            # The rule gets these operands too, so that they must not count as constants.
            new["num_consts"] = 0
            if self.is_jvp:
                new["symbolic_zeros"] = True  # a reference has no array of zeros
            else:
                new["bwd"] = compat.with_zeros(new["bwd"], avals[: sum(hidden)])
        new[name] = compat.wrap_fun(rule, new[name].debug_info)
        if leading and "out_trees" in new:
            new["out_trees"] = functools.partial(_shifted, new["out_trees"], len(leading))
        return new


class _HiPrim:
    """The same of a call that is a HiPrim."""

    def __init__(self, around: Around, params: dict[str, Any]):
        self._prim, self._count = params["_prim"], len(around.operands.avals)
        self._rule = functools.partial(prim_rule, around, around.session.numbers.copy())
        self.of: OfRule | None = None
        body = custom_body(compat.call_hi_primitive_p, params, self._count)
        assert body is not None
        self.body, self.symbolic_zeros = body, self._prim.symbolic_zeros
        self.is_jvp = compat.is_jvp_prim(self._prim)

    def stage(self) -> Staged:
        """Stage the rule with the function."""
        prim = self._prim
        jaxpr, consts, result = stage_packed(
            "rule",
            lambda values: self._run(compat.rule_arguments(prim, values), is_later=False),
            compat.rule_types(prim),
        )
        return Staged(*hoisted(jaxpr, consts), result)

    def _run(self, args: tuple, is_later: bool) -> Any:
        """Run the rule with its operations tapped."""
        rule, fn = self._rule(is_later, of=self.of), compat.prim_rule_of(self._prim)
        if self.is_jvp:
            return rule(fn, 0, args, len(jax.tree.leaves(args[1])))
        return rule(fn, self._count, args, 0)

    def made(
        self,
        jaxpr: Any,
        leading: Sequence[Any],
        backward: Backward | None,
        staged: Staged | None,
    ) -> dict[str, Any]:
        """Return the parameters of the call; see ``_Primitive.made``."""
        prim, types = self._prim, list(map(compat.typeof, leading))

        def rule(extra: Sequence[Any], args: tuple) -> Any:
            if staged is None:
                return self._run(args, is_later=True)
            found = compat.as_function(staged.jaxpr)(*extra, *compat.rule_values(prim, args))
            return staged.results.build(found)

        bwd = None if backward is None or self.is_jvp else backward(prim.bwd)
        return {"_prim": compat.custom_with(prim, jaxpr, types, rule, refuse, bwd)}


Hidden = tuple[int, int]
"""How many operands come before a function's own: of handlers, and the call's constants."""


def _check_hidden(varies: Sequence[bool], hidden: Hidden) -> None:
    """Raise JaxtapError if a handler's value is differentiated."""
    if any(varies[: hidden[0]]):
        refuse()


def _jvp_of(staged: Staged, hidden: Hidden, avals: Sequence[Any]) -> Callable[..., tuple]:
    """Return a rule of a ``custom_jvp`` for all operands of the call, with symbolic zeros.

    Args:
        staged: the rule, of its extra values, the function's operands and their tangents.
    """
    run, own = compat.as_function(staged.jaxpr), range(sum(hidden), len(avals))
    tangents = [aval.to_tangent_aval() for aval in avals]

    @functools.cache
    def jvp(*zeros: bool) -> tuple:
        given = [i for i, is_zero in enumerate(zeros) if not is_zero]
        _check_hidden([not is_zero for is_zero in zeros], hidden)

        def flat(*values: Any) -> list[Any]:
            primals = values[: len(avals)]
            known = dict(zip(given, values[len(avals) :], strict=True))
            along = [known[i] if i in known else compat.zeros_like_aval(tangents[i]) for i in own]
            return run(*primals[: hidden[0]], *primals[own.start :], *along)

        types = [*avals, *(tangents[i] for i in given)]
        return (*compat.stage(flat, types, compat.named_info("jvp")), *staged.results)

    return jvp


def _fwd_of(staged: Staged, hidden: Hidden, avals: Sequence[Any]) -> Callable[..., tuple]:
    """Return the forward rule of a ``custom_vjp`` for all operands of the call."""
    run, own = compat.as_function(staged.jaxpr), sum(hidden)

    @functools.cache
    def fwd(*varies: bool) -> tuple:
        _check_hidden(varies, hidden)
        if any(varies[:own]):
            raise compat.CustomVJPException

        def flat(*values: Any) -> list[Any]:
            return run(*values[: hidden[0]], *values[own:])

        return (*compat.stage(flat, avals, compat.named_info("fwd")), *staged.results)

    return fwd


def _shifted(out_trees: Callable[[], tuple], extra: int) -> tuple:
    """Return a rule's output trees for ``extra`` more leading operands."""
    out_tree, res_tree, forwarded = out_trees()
    return out_tree, res_tree, [None if i is None else i + extra for i in forwarded]
