"""Custom: calls with custom derivative rules, with all of it tapped.

A rule runs instead of the function, when JAX gets to it: its operations count from where the
function's do. By then the loops around have ended, and with them the tracers of their bodies. So if
handlers use values from around the call, such as the number of a loop's step or the contents of a
Box, the rule is staged with the function, and the values become operands of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import compat
from ..dataflow.holders import SAME, Body, custom_body
from ..staging.deferred import Staged
from ..staging.marker import hoisted
from ..staging.packed import Packed, stage_packed
from .bodies import proxies_of_body, tap_body, untrained
from .entering import Rebuilt, emit, share
from .frames import Operands, Place
from .hi_prims import refuse
from .one_pass import Pass
from .rules import CustomRule, prim_rule, tap_rule, tapped_rule
from .session import Session
from .tasks import Task


def enter_custom(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Make a call with custom derivative rules, with all of it tapped."""
    eqn = task.eqn
    new = rebuild_custom(run.session, run.place(task), eqn.params, values, run.operands(eqn))
    emit(run, task, eqn, new, info)


def rebuild_custom(
    session: Session,
    place: Place,
    params: dict[str, Any],
    values: Sequence[Any],
    operands: Operands,
) -> Rebuilt:
    """Return a call with custom derivative rules, with all of it tapped."""
    if "_prim" in params:
        return _rebuild_prim(session, place, params["_prim"], values, operands)
    new = dict(params)
    name = "jvp_jaxpr_fun" if "jvp_jaxpr_fun" in params else "fwd_jaxpr_thunk"
    first, count = params["num_consts"], len(values)
    custom = CustomRule(params[name], place, operands, first, session.numbers.copy())
    body = Body(params["call_jaxpr"], tuple(range(count)), (SAME,) * count)
    taken = proxies_of_body(body, untrained(operands.proxies))
    tapped = tap_body(session, place, body, operands, taken)
    new["call_jaxpr"] = tapped.jaxpr
    leading = (*tapped.extra, *(taken.leading if tapped.takes_proxies else ()))
    if "bwd" in params and place.frame.is_derived:
        tap = functools.partial(_backward, session, place, operands, params["call_jaxpr"])
        new["bwd"] = compat.rule_like(params["bwd"], tap)
    staged = None
    # With symbolic zeros a rule differs by call. A rule often calls its function: that would have
    # no end.
    if tapped.extra and not params["symbolic_zeros"] and not place.frame.is_rule:
        staged = _staged(session, custom, [name == "fwd_jaxpr_thunk"] * (count - first))
    if staged is not None and staged.more:
        both = [tapped.jaxpr, staged.jaxpr]
        (new["call_jaxpr"], rule), leading = share(both, [leading, staged.more])
        staged, hidden = staged._replace(jaxpr=rule), (len(leading), first)
        avals = list(map(compat.typeof, [*leading, *values]))
        # The rule gets these operands too, so that they must not count as constants.
        new["num_consts"] = 0
        if name == "jvp_jaxpr_fun":
            new["symbolic_zeros"] = True  # a reference has no array of zeros
            rule = _jvp_of(staged, hidden, avals)
        else:
            new["bwd"] = compat.with_zeros(new["bwd"], avals[: sum(hidden)])
            rule = _fwd_of(staged, hidden, avals)
    else:
        new["num_consts"] = first + len(leading)
        rule = tapped_rule(session, custom)
    new[name] = compat.wrap_fun(rule, params[name].debug_info)
    if leading and "out_trees" in params:
        new["out_trees"] = functools.partial(_shifted, params["out_trees"], len(leading))
    return Rebuilt(new, [*leading, *values], tapped.outcome)


def _backward(
    session: Session, place: Place, operands: Operands, jaxpr: Any, rule: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a backward rule, tapped, of a call that the program differentiates.

    JAX runs it in the transpose of what is around the call, when operations after the call have
    been counted. So its operations have another label, which tells the call.

    Args:
        session: the call of the wrapped function.
        place: where the function's call is.
        operands: what is known of the call's operands.
        jaxpr: the function's program.
        rule: the rule, called with residuals and cotangents.
    """
    frame, (_, _, name) = place.frame, compat.label(jaxpr).partition("(")
    own = f"custom_vjp({name}.bwd"
    number = session.numbers.next(frame.path(place.scopes), frame.label, own)
    label = ".".join(filter(None, (frame.label, f"{own}{number or ''}")))
    tapped = prim_rule(session, place, operands, session.numbers.copy(), label=label)
    return lambda *args: tapped(rule, -1, args, 0)


def _staged(session: Session, custom: CustomRule, flags: Sequence[bool]) -> Staged | None:
    """Stage a rule with its function. Return None if it raises, which matters where it is used."""
    try:
        jaxpr, consts, *rest = tap_rule(session, custom, flags, is_later=False)
    except Exception:
        return None
    jaxpr, extra = hoisted(compat.open_of(jaxpr), list(consts))
    return Staged(jaxpr, extra, rest)


def _rebuild_prim(
    session: Session, place: Place, prim: Any, values: Sequence[Any], operands: Operands
) -> Rebuilt:
    """Return the same for a call that is a HiPrim."""
    numbers = session.numbers.copy()
    body = custom_body(compat.call_hi_primitive_p, {"_prim": prim}, len(values))
    assert body is not None
    taken = proxies_of_body(body, untrained(operands.proxies))
    tapped = tap_body(session, place, body, operands, taken)
    jaxpr = tapped.jaxpr
    leading = (*tapped.extra, *(taken.leading if tapped.takes_proxies else ()))

    def run(args: tuple, is_later: bool) -> Any:
        rule, fn = prim_rule(session, place, operands, numbers, is_later), compat.prim_rule_of(prim)
        if compat.is_jvp_prim(prim):
            return rule(fn, 0, args, len(jax.tree.leaves(args[1])))
        return rule(fn, len(operands.avals), args, 0)

    def call(extra: Sequence[Any], args: tuple) -> Any:
        return run(args, is_later=True)

    # As for other calls: see ``rebuild_custom``.
    if tapped.extra and not prim.symbolic_zeros and not place.frame.is_rule:
        staged = _staged_prim(prim, functools.partial(run, is_later=False))
        if staged is not None and staged.more:
            (jaxpr, rule), leading = share([jaxpr, staged.jaxpr], [leading, staged.more])
            call = _given(prim, compat.as_function(rule), *staged.results)
    hidden = list(map(compat.typeof, leading))
    bwd = None
    if place.frame.is_derived and not compat.is_jvp_prim(prim):
        bwd = _backward(session, place, operands, body.jaxpr, prim.bwd)
    made = compat.custom_with(prim, jaxpr, hidden, call, refuse, bwd)
    return Rebuilt({"_prim": made}, [*leading, *values], tapped.outcome)


def _staged_prim(prim: Any, run: Callable[[tuple], Any]) -> Staged | None:
    """Stage the rule of a HiPrim with its function. Return None if it raises."""
    try:
        jaxpr, consts, result = stage_packed(
            "rule",
            lambda values: run(compat.rule_arguments(prim, values)),
            compat.rule_types(prim),
        )
    except Exception:
        return None
    return Staged(*hoisted(jaxpr, consts), [result])


def _given(
    prim: Any, rule: Callable[..., list[Any]], result: Packed
) -> Callable[[Sequence[Any], tuple], Any]:
    """Return the rule that was staged as ``rule``, of the handlers' values and its arguments."""

    def call(extra: Sequence[Any], args: tuple) -> Any:
        return result.build(rule(*extra, *compat.rule_values(prim, args)))

    return call


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
        hidden: the operands before those.
        avals: the types of all operands.
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
