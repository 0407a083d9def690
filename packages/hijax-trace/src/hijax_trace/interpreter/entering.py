"""Entering: equations that hold programs, rebuilt with those tapped, or inlined."""

from __future__ import annotations

from typing import Any

from .. import compat
from ..dataflow.flow import forwarded
from ..dataflow.sources import returned_views
from ..staging.marker import Marker, MarkerName
from .custom import rebuild_custom
from .frames import Frame
from .one_pass import Pass, mark_replaced
from .rebuild import again, rebuild
from .tasks import Task


def inline(
    run: Pass,
    task: Task,
    closed: Any,
    values: list[Any],
    info: Any,
    within: frozenset[str] | None = None,
) -> Frame:
    """Re-interpret the program of a call instead of the call. Return its frame.

    Args:
        run: the pass.
        task: the call's task.
        closed: the program, closed.
        values: the operands.
        info: the source of the call.
        within: names of tapped functions around it; by default those of the frame.
    """
    eqn, frame, jaxpr = task.eqn, run.frame, compat.open_of(closed)
    inner = inner_frame(run, task, closed, within)
    results = run.session.reinterpret(inner, jaxpr, compat.consts_of(closed) + values, info)
    for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
        if type(atom) is compat.Literal:
            continue
        if atom in inner.metadata:
            frame.metadata[var] = inner.metadata[atom]
        if atom in inner.proxies:
            frame.proxies[var] = inner.proxies[atom]
    mark_replaced(frame, eqn, inner)
    run.write(eqn.outvars, results)
    return inner


def inner_frame(
    run: Pass,
    task: Task,
    closed: Any,
    within: frozenset[str] | None = None,
    untapped: bool | None = None,
) -> Frame:
    """Return the frame of a program for a call's operands."""
    place, consts = run.place(task, within, untapped), compat.consts_of(closed)
    return place.inside(compat.open_of(closed), run.operands(task.eqn), consts=consts)


def enter(
    run: Pass,
    task: Task,
    values: list[Any],
    info: Any,
    within: frozenset[str] | None = None,
) -> None:
    """Make an equation with the programs that it holds tapped."""
    eqn = task.eqn
    # JAX would keep it where it is differentiated or mapped, once for equal calls. Here calls are
    # not equal, if handlers act in them.
    is_inlined = task.inlined and compat.staging_trace(run.trace) is not None
    if is_inlined or _returns_proxy(run, eqn):
        inline(run, task, eqn.params["jaxpr"], values, info, within)
        return
    applied = run.frame.applied
    if applied is not None and applied.is_by(eqn):
        run.emit(task, eqn, again(applied, values), info)
        return
    place, operands = run.place(task, within), run.operands(eqn)
    new = rebuild(run.session, place, eqn.primitive, eqn.params, values, operands)
    run.emit(task, eqn, new, info)


def _returns_proxy(run: Pass, eqn: Any) -> bool:
    """Return whether a call moves and returns a proxied operand.

    Operands that it returns as they are need no care: see ``forwarded``.
    """
    if not run.frame.proxies or eqn.primitive is not compat.jit_p:
        return False
    views = returned_views(eqn, [run.frame.proxy(atom) is not None for atom in eqn.invars])
    return not set(views) <= {i for i, _ in forwarded(eqn)}


def enter_marker(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Make another interceptor's marker again, with its program tapped."""
    marker, eqn = task.marker, task.eqn
    assert marker is not None
    if not run.session.tapping.tasks.wants(eqn.params["jaxpr"]):
        run.write(eqn.outvars, compat.rebind(eqn, values, info))
        return
    place, operands = run.place(task), run.operands(eqn)
    new = rebuild(run.session, place, eqn.primitive, eqn.params, values, operands)
    again = Marker(
        marker.owner,
        marker.op_name,
        marker.site,
        run.session.tapping.rewrap(marker.function),
        marker.packed,
        marker.results,
        marker.extra + len(new.values) - len(values),
    )
    name = MarkerName.of(again, new.params["jaxpr"])
    run.emit(task, eqn, new._replace(params={**new.params, "name": name}), info)


def enter_custom(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Make a call with custom derivative rules, with all of it tapped."""
    eqn = task.eqn
    new = rebuild_custom(run.session, run.place(task), eqn.params, values, run.operands(eqn))
    run.emit(task, eqn, new, info)
