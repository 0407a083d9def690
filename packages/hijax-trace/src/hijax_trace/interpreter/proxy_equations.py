"""Proxy equations: equations that move, use or return values with array proxies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..dataflow.expression import Expression
from ..dataflow.flow import forwarded
from ..dataflow.follow import follow
from ..dataflow.sources import returned_views
from ..proxy.array_proxy import Lost, is_proxy
from ..proxy.carrier import Carrier, proxy_of
from ..proxy.moves import VIEWS
from .entering import enter, inline
from .frames import Frame
from .lazy import later_array
from .one_pass import Pass
from .questions import EXPRESSION
from .tasks import Do, Task

_LOOKUPS = ("dynamic_slice", "gather")


def make(run: Pass, task: Task, values: list[Any], info: Any) -> bool:
    """Make an equation by the array proxies of its operands.

    Returns:
        Whether it was made. It was not if it must be made as its task says.
    """
    eqn = task.eqn
    if task.do is not Do.PASS or not eqn.invars:
        return False
    held = [run.frame.proxy(atom) for atom in eqn.invars]
    if not any(held):
        return False
    is_held = [one is not None for one in held]
    if task.inlined or (eqn.primitive is compat.jit_p and returned_views(eqn, is_held)):
        inline(run, task, eqn.params["jaxpr"], values, info)
        return True
    if eqn.primitive is compat.cond_p and returned_views(eqn, is_held):
        enter(run, task, values, info)
        return True
    return follow_moves(run, task, values, info) or compute(run, task, values, info)


def follow_moves(run: Pass, task: Task, values: list[Any], info: Any) -> bool:
    """Make an equation that moves elements, and move array proxies with them.

    Returns:
        Whether it was made: it is a move of an operand with an array proxy.
    """
    eqn, frame = task.eqn, run.frame
    with compat.at(info), eqn.ctx.manager:
        found = _followed(frame, eqn, values)
        if found is None:
            return False
        looked_up = found[0] if eqn.primitive.name in _LOOKUPS else None
        is_array = looked_up is not None and not isinstance(looked_up, Lost)
        if is_array:
            # Only the rows that are looked up are restored, not the whole table. What a slice
            # takes may be a weight, which nothing restores.
            array = later_array(looked_up, eqn.outvars[0].aval)
            run.write(eqn.outvars, [array.make() if eqn.primitive.name == "gather" else array])
    if not is_array:
        run.again(task, eqn, values, info)
    pairs = zip(eqn.outvars, found, strict=True)
    frame.proxies.update((var, proxy) for var, proxy in pairs if proxy)
    return True


def _followed(frame: Frame, eqn: Any, values: list[Any]) -> list[Any] | None:
    """Return the proxies of an equation's results, or None."""
    held = [proxy_of(frame.proxy(atom)) for atom in eqn.invars]
    if eqn.primitive.name not in VIEWS or not any(held):
        return None

    def expression(i: int) -> Expression:
        frame.note(EXPRESSION)
        return frame.expression(eqn.invars[i])

    avals = [var.aval for var in eqn.outvars]
    return follow(eqn.primitive.name, eqn.params, values, held, avals, expression)


def compute(run: Pass, task: Task, values: list[Any], info: Any) -> bool:
    """Make an equation by ``ArrayProxy.computed`` of an operand's proxy.

    Returns:
        Whether it was made: a proxy computes this primitive.
    """
    eqn, frame = task.eqn, run.frame
    if compat.holds_jaxprs(eqn):
        return False
    with compat.at(info), eqn.ctx.manager:
        results = computed(frame, eqn, values, values)
    if results is None:
        return False
    frame.replace(eqn.outvars, is_own=True)
    run.write(eqn.outvars, results)
    return True


def restore(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Restore the array of a proxy that the program carries."""
    eqn = task.eqn
    proxy = eqn.params["function"].proxy(values)
    with compat.at(info), eqn.ctx.manager:
        array = proxy.restore().astype(eqn.outvars[0].aval.dtype)
    run.frame.proxies[eqn.outvars[0]] = proxy
    run.write(eqn.outvars, [array])


def computed(
    frame: Frame, eqn: Any, values: Sequence[Any], own: Sequence[Any]
) -> Sequence[Any] | None:
    """Return an equation's results as an operand's proxy computes them.

    Args:
        values: its operands, or what a handler gave instead. Those have no proxy.
    """
    held = [proxy_of(frame.proxy(atom)) for atom in eqn.invars]
    operands = [
        value if proxy is None or isinstance(proxy, Lost) or value is not mine else proxy
        for value, mine, proxy in zip(values, own, held, strict=False)
    ]
    proxy = next((one for one in operands if is_proxy(one)), None)
    return None if proxy is None else proxy.computed(eqn.primitive.name, eqn.params, operands)


def carry(frame: Frame, eqn: Any) -> None:
    """Let carriers of an equation's operands go along with its results."""
    held = [frame.proxy(atom) for atom in eqn.invars]
    carriers = [one for one in held if type(one) is Carrier]
    for var in eqn.outvars if carriers else ():
        frame.note(EXPRESSION)
        expression = frame.expression(var)
        key, own = expression.key, proxy_of(frame.proxies.pop(var, None))
        is_parameter = carriers[0].is_parameter
        is_weight = expression.kind(is_parameter) in ("view", "derived")
        if is_weight and expression.is_known(is_parameter):
            frame.proxies[var] = carriers[0].at(carriers[1:], key, var.aval, own)
        elif own is not None:
            frame.proxies[var] = own


def forward(frame: Frame, eqn: Any) -> None:
    """Keep what is known of operands that an equation returns."""
    held = [frame.proxy(atom) is not None for atom in eqn.invars]
    if not any(held) and not (frame.metadata and any(map(frame.metadata_of, eqn.invars))):
        return
    for i, operand in forwarded(eqn):
        if metadata := frame.metadata_of(eqn.invars[operand]):
            frame.metadata.setdefault(eqn.outvars[i], metadata)
        if proxy := frame.proxy(eqn.invars[operand]):
            frame.proxies.setdefault(eqn.outvars[i], proxy)
    # A view that was moved inside has lost its proxy, and a handler can learn why.
    for i in returned_views(eqn, held) if any(held) else ():
        aval = eqn.outvars[i].aval
        why = f"{eqn.primitive.name} returns it. Use it where it is moved."
        frame.proxies.setdefault(eqn.outvars[i], Lost(aval.shape, aval.dtype, why))
