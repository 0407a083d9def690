"""Equations that move or compute with what has an array proxy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..dataflow.dataflow import returned_views
from ..proxy.array_proxy import Lost
from ..state.held import held_in
from .atoms import computed, followed, variable
from .entering import inline
from .one_pass import Pass
from .tasks import Do, Task


def moves(run: Pass, task: Task, values: list[Any], info: Any) -> bool:
    """Make an equation that moves what has an array proxy. Return whether it did."""
    eqn, proxies = task.eqn, run.frame.proxies
    if task.do is not Do.PASS or not eqn.invars:
        return False
    held = [proxies.get(variable(atom)) for atom in eqn.invars]
    if not any(held):
        return False
    if task.inlined or _is_view(run, eqn, held):
        within = run.frame.within | task.within
        inline(run, task, eqn.params["jaxpr"], values, info, within)
        return True
    return follows(run, task, values, info) or computes(run, task, values, info)


def follows(run: Pass, task: Task, values: list[Any], info: Any) -> bool:
    """Make an equation that moves elements, with the array proxies of its operands."""
    eqn, frame = task.eqn, run.frame
    with compat.at(info), eqn.ctx.manager:
        found = followed(frame, eqn, values)
        if found is None:
            return False
        looked_up = found[0] if eqn.primitive.name == "gather" else None
        is_array = looked_up is not None and not isinstance(looked_up, Lost)
        if is_array:
            # Rows of a table: those that are needed alone, not the table, become an array.
            run.write(eqn.outvars, [looked_up.restore().astype(eqn.outvars[0].aval.dtype)])
    if not is_array:
        run.again(task, eqn, values, info)
    pairs = zip(eqn.outvars, found, strict=True)
    frame.proxies.update((var, proxy) for var, proxy in pairs if proxy)
    return True


def computes(run: Pass, task: Task, values: list[Any], info: Any) -> bool:
    """Make an equation by what the array proxies of its operands compute, if they do."""
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
    """Return whether an equation is the call of a function that moves what has a proxy."""
    if eqn.primitive is not compat.jit_p:
        return False
    return bool(returned_views(eqn, [proxy is not None for proxy in held]))


def held(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Take an array from the proxy that the program carries."""
    eqn = task.eqn
    proxy = held_in(eqn.primitive, eqn.params, values)
    assert proxy is not None
    with compat.at(info), eqn.ctx.manager:
        array = proxy.restore().astype(eqn.outvars[0].aval.dtype)
    run.frame.proxies[eqn.outvars[0]] = proxy
    run.write(eqn.outvars, [array])
