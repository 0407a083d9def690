"""Equations that JAX has mapped or derived: made of what they were before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..staging.mapped import Level, mapped_in
from .apart import Apart, Derivatives, Linear, Once
from .atoms import metadata_of
from .entering import inline
from .frames import Frame, Operands
from .one_pass import Pass, join
from .tasks import Task


def make_mapped(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Map what an equation was before JAX has mapped it, with that tapped."""
    eqn, operands = task.eqn, run.operands(task.eqn)
    mapped = mapped_in(eqn.primitive, eqn.params)
    assert mapped is not None
    apart = _apart(run, task, mapped.jaxpr, mapped.levels, operands, info)
    with compat.at(info), eqn.ctx.manager:
        results = mapped.run(apart.run, values, operands.proxies)
    _finish(run, eqn, apart.frame, results, mapped.jaxpr)


def make_kept(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Make an equation of the program that JAX has derived it from, with that tapped."""
    eqn, operands = task.eqn, run.operands(task.eqn)
    function, program = eqn.params["function"], eqn.params["function"].program
    if run.derivatives is None:
        run.derivatives = Derivatives(run.jaxpr)
    derivatives = run.derivatives
    if function is program and derivatives.is_alone(program):
        within = run.frame.within | task.within
        inline(run, task, program.jaxpr, values, info, within)
        return
    made, derivative = derivatives.linear(eqn), derivatives.of(eqn)
    # A derivative does again what was made of the function: its handlers were asked for that.
    kept = derivatives.program(eqn) or run.session.kept.get(program)
    once = kept if made is None else made.once
    if once is None or not function.is_derived:
        is_known = function.places == list(range(len(function.places)))
        levels, closed = function.levels, program.jaxpr
        once = Once(_apart(run, task, closed, levels, operands, info, is_known))
        run.session.kept[program] = once
        derivatives.keep_program(eqn, once)
    with compat.at(info), eqn.ctx.manager:
        if made is not None:
            results = made.call(values[made.count :])
        elif derivative is None:
            results = function.run(once.run, values, operands.proxies)
        else:
            results, call = derivative.split(once.run, values, operands.proxies)
            derivatives.keep(derivative, eqn, Linear(len(values), call, once))
    _finish(run, eqn, once.frame, results, None if function.is_derived else program.jaxpr)


def _apart(
    run: Pass,
    task: Task,
    closed: Any,
    levels: Sequence[Level],
    operands: Operands,
    info: Any,
    is_known: bool = True,
) -> Apart:
    """Return what an equation was before JAX has transformed it."""

    def again(frame: Frame, jaxpr: Any, values: list[Any]) -> list[Any]:
        return run.reinterpret(run.session, frame, jaxpr, values, info)

    around = run.around(task, run.frame.within, run.frame.untapped)
    return Apart(again, around, closed, levels, operands, is_known)


def _finish(
    run: Pass, eqn: Any, inner: Frame | None, results: list[Any], closed: Any = None
) -> None:
    """Go on with what an equation was, made again; with its results, if they are this one's."""
    assert inner is not None
    atoms = [] if closed is None else compat.open_of(closed).outvars
    for var, atom in zip(eqn.outvars, atoms, strict=False):
        if metadata := metadata_of(inner, atom):
            run.frame.metadata[var] = metadata
    join(run.frame, eqn, inner)
    run.write(eqn.outvars, results)
