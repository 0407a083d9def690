"""Equations that hold a program: made again with it tapped, or run in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..dataflow.dataflow import returned_views
from ..dataflow.flow import handed_on
from ..staging.marker import Marker, MarkerName
from .atoms import variable
from .bodies import Entered, custom, enter
from .frames import Around, Frame
from .one_pass import Pass, join
from .tasks import Task


def inline(
    run: Pass, task: Task, closed: Any, values: list[Any], info: Any, within: frozenset[str]
) -> None:
    """Run what an equation stands for in its place."""
    eqn, frame, jaxpr = task.eqn, run.frame, compat.open_of(closed)
    inner = inner_frame(run, task, closed, within, frame.untapped)
    results = run.reinterpret(run.session, inner, jaxpr, compat.consts_of(closed) + values, info)
    for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
        if type(atom) is compat.Literal:
            continue
        if atom in inner.metadata:
            frame.metadata[var] = inner.metadata[atom]
        if atom in inner.proxies:
            frame.proxies[var] = inner.proxies[atom]
    join(frame, eqn, inner)
    run.write(eqn.outvars, results)


def inner_frame(
    run: Pass, task: Task, closed: Any, within: frozenset[str], untapped: bool
) -> Frame:
    """Return the frame of what an equation stands for."""
    frame, operands = run.frame, run.operands(task.eqn)
    path = frame.own_path(task.scopes)
    jaxpr = compat.open_of(closed)
    known = (operands.origins, operands.metadata)
    where = (path, frame.label, within, untapped, frame)
    return Frame(
        jaxpr,
        *known,
        *where,
        operands.proxies,
        operands.expressions,
        compat.consts_of(closed),
        frame.depth,
    )


def enter_held(
    run: Pass,
    task: Task,
    values: list[Any],
    info: Any,
    within: frozenset[str] | None = None,
) -> None:
    """Make an equation with what it holds tapped."""
    eqn, frame = task.eqn, run.frame
    if (task.inlined and run.appends) or _returns_proxy(run, eqn):
        within = (within or frame.within) | task.within
        inline(run, task, eqn.params["jaxpr"], values, info, within)
        return
    around = run.around(task, frame.within if within is None else within, frame.untapped)
    new = entered(run, task, eqn.params, values, around)
    run.emit(task, eqn, new, info)


def entered(
    run: Pass, task: Task, params: dict[str, Any], values: Sequence[Any], around: Around
) -> Entered:
    """Return an equation, with parameters that may be others, with what it holds tapped."""
    eqn, operands = task.eqn, run.operands(task.eqn)
    return enter(run.reinterpret, run.session, around, eqn.primitive, params, values, operands)


def _returns_proxy(run: Pass, eqn: Any) -> bool:
    """Return whether an equation is the call of a function that returns what it has moved.

    What it returns as it was given needs no care: see ``handed_on``.
    """
    proxies = run.frame.proxies
    if not proxies or eqn.primitive is not compat.jit_p:
        return False
    views = returned_views(eqn, [variable(atom) in proxies for atom in eqn.invars])
    return not set(views) <= {i for i, _ in handed_on(eqn)}


def enter_marker(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Make another interceptor's marker again, with what it stands for tapped."""
    marker, eqn = task.marker, task.eqn
    assert marker is not None
    if not run.session.tapping.tasks.wants(eqn.params["jaxpr"]):
        run.write(eqn.outvars, compat.rebind(eqn, values, info))
        return
    around = run.around(task, run.frame.within, run.frame.untapped)
    new = entered(run, task, eqn.params, values, around)
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
    """Make the call of a function with custom derivative rules, with both tapped."""
    eqn, frame = task.eqn, run.frame
    around = run.around(task, frame.within, frame.untapped)
    new = custom(run.reinterpret, run.session, around, eqn.params, values, run.operands(eqn))
    run.emit(task, eqn, new, info)
