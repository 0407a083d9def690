"""Deriving: equations that JAX mapped or derived, made from their originals."""

from __future__ import annotations

from typing import Any

from .. import compat
from ..staging.functions import Function
from .entering import inline
from .frames import Frame, Operands
from .one_pass import Pass, mark_replaced
from .original import Derivatives, Linear, Original, SharedProgram
from .tasks import Task


def make_deferred(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Tap the operation that JAX mapped or derived, and map or derive the result.

    A derivative reuses what was made for its operation: a handler is asked once, and forward and
    backward compute the same.
    """
    eqn, operands = task.eqn, run.operands(task.eqn)
    function, program = eqn.params["function"], eqn.params["function"].program
    if run.derivatives is None:
        run.derivatives = Derivatives(run.jaxpr)
    derivatives = run.derivatives
    if not function.is_derived and derivatives.has_no_derivative(program):
        if function is program:
            inline(run, task, program.jaxpr, values, info)
            return
        original = _original(run, task, operands, info, function)
        with compat.at(info), eqn.ctx.manager:
            results = function.run(original.run, values, operands.proxies)
        _finish(run, eqn, original.frame, results, program.jaxpr)
        return
    made, derivative = derivatives.linear(eqn), derivatives.of(eqn)
    # A derivative in a nested jaxpr finds the original of one around it in the session.
    kept = derivatives.program(eqn) or run.session.made.get(program)
    shared = kept if made is None else made.shared
    # A transpose of the program itself has its own operands, and no operation before it.
    if shared is None or not function.is_derived or (function.linear and made is None):
        shared = SharedProgram(_original(run, task, operands, info, function))
        run.session.made[program] = shared
        derivatives.keep_program(eqn, shared)
    with compat.at(info), eqn.ctx.manager:
        if made is not None:
            results = made.call(values[made.count :])
        elif derivative is None:
            results = function.run(shared.run, values, operands.proxies)
        else:
            results, call = derivative.split(shared.run, values, operands.proxies)
            derivatives.keep(derivative, eqn, Linear(len(values), call, shared))
    _finish(run, eqn, shared.frame, results, None if function.is_derived else program.jaxpr)


def _original(run: Pass, task: Task, operands: Operands, info: Any, function: Function) -> Original:
    """Return the program of an equation before JAX mapped or derived it."""

    def again(frame: Frame, jaxpr: Any, values: list[Any]) -> list[Any]:
        return run.session.reinterpret(frame, jaxpr, values, info)

    return Original(again, run.place(task), function, operands)


def _finish(
    run: Pass, eqn: Any, inner: Frame | None, results: list[Any], closed: Any = None
) -> None:
    """Continue with results; those of the original ``closed`` have its metadata."""
    assert inner is not None
    atoms = [] if closed is None else compat.open_of(closed).outvars
    for var, atom in zip(eqn.outvars, atoms, strict=False):
        if metadata := inner.metadata_of(atom):
            run.frame.metadata[var] = metadata
    mark_replaced(run.frame, eqn, inner)
    run.write(eqn.outvars, results)
