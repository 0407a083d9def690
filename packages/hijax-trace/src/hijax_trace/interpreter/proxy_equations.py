"""Proxy equations: equations that move or use values with array proxies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..dataflow.sources import returned_views
from ..proxy.array_proxy import Lost
from .atoms import computed, followed
from .entering import enter, inline
from .one_pass import Pass, later_array
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
    if task.inlined or _is_view(run, eqn, held):
        inline(run, task, eqn.params["jaxpr"], values, info)
        return True
    if eqn.primitive is compat.cond_p and returned_views(eqn, [one is not None for one in held]):
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
        found = followed(frame, eqn, values)
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
    frame.replaced.update(eqn.outvars)
    run.write(eqn.outvars, results)
    return True


def _is_view(run: Pass, eqn: Any, held: Sequence[Any]) -> bool:
    """Return whether an equation is a call that returns a proxied view."""
    if eqn.primitive is not compat.jit_p:
        return False
    return bool(returned_views(eqn, [proxy is not None for proxy in held]))


def restore(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Restore the array of a proxy that the program carries."""
    eqn = task.eqn
    proxy = eqn.params["function"].proxy(values)
    with compat.at(info), eqn.ctx.manager:
        array = proxy.restore().astype(eqn.outvars[0].aval.dtype)
    run.frame.proxies[eqn.outvars[0]] = proxy
    run.write(eqn.outvars, [array])
