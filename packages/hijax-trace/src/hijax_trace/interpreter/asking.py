"""Asking: equations that a handler is asked about, and its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from interception_core import TargetError

from .. import compat
from ..staging.deferred import Program, Staged, can_defer
from ..staging.marker import Marker, check_result, check_value, hoisted
from ..staging.packed import Packed
from .call import TraceCall
from .entering import enter, inline, inner_frame, rebuild
from .one_pass import Pass
from .proxy_equations import compute, computed, follow_moves
from .tasks import Task


def ask(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Ask the handler of a primitive."""
    eqn, frame = task.eqn, run.frame
    name, handler = run.session.tapping.tasks.asked(eqn.primitive, eqn.params, len(values))
    if run.is_untapped(task):
        _let_run(run, task, values, info, frame.within)
        return
    proceed = functools.partial(_proceed, run, task, info)
    params, atoms = eqn.params, eqn.invars

    def given(values: list[Any]) -> tuple[TraceCall, Any]:
        call = _call(run, name, "primitive", tuple(values), params, task, values, atoms, proceed)
        with compat.at(info), eqn.ctx.manager:
            return call, handler(call, *values, **params)

    def checked(call: TraceCall, result: Any) -> list[Any]:
        results = list(result) if eqn.primitive.multiple_results else [result]
        if len(results) != len(eqn.outvars):
            raise TargetError(
                f"The handler of {call.op_id} must return {len(eqn.outvars)} results, as "
                f"{eqn.primitive.name} does, got {len(results)}. Return one value for each result."
            )
        for value, var in zip(results, eqn.outvars, strict=True):
            check_value(call, value, var.aval)
        return results

    if not _ask(run, task, given, checked, atoms, values, info) and not (
        frame.proxies and follow_moves(run, task, values, info)
    ):
        _let_run(run, task, values, info, frame.within | {name})


def ask_of_function(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Ask the handler of a function whose call is a marker."""
    eqn, marker, within = task.eqn, task.marker, run.frame.within
    assert marker is not None
    entry = run.session.tapping.functions.get(marker.site)
    if run.is_untapped(task) or entry is None:
        inline(run, task, eqn.params["jaxpr"], values, info)
        return
    _, handler = entry
    arrays, atoms = values[marker.extra :], eqn.invars[marker.extra :]
    proceed = functools.partial(_proceed_call, run, task, marker, values, info)
    before = 0 if run.answers is None else compat.staged_count(run.trace)

    def given(arrays: list[Any]) -> tuple[TraceCall, Any]:
        args, kwargs = marker.packed.build(arrays)
        call = _call(run, marker.op_name, "function", args, kwargs, task, arrays, atoms, proceed)
        with compat.at(info), eqn.ctx.manager:
            return call, handler(call, *args, **kwargs)

    def checked(call: TraceCall, result: Any) -> list[Any]:
        avals = [var.aval for var in eqn.outvars]
        results = check_result(call, result, marker.results, avals)
        if run.answers is not None:
            run.answers.keep(task, info, call, results, before)
        return results

    if not _ask(run, task, given, checked, atoms, arrays, info):
        inline(run, task, eqn.params["jaxpr"], values, info, within | {marker.op_name})


def ask_of_group(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Ask the handler of a function that several equations spell out."""
    gathered = task.gathered
    assert gathered is not None
    (site, group, also_used, _), eqn = gathered.found, task.eqn
    entry = None if run.is_untapped(task) else run.session.tapping.functions.get(site)
    if entry is not None:
        arrays = [run.values[var] for var in group.inputs]
        params = {"written": group.written, "also_used": also_used}

        def proceed(*values: Any, written: Any, also_used: Any) -> Any:
            return written(*values)

        def given(arrays: list[Any]) -> tuple[TraceCall, Any]:
            name, args = group.name, tuple(arrays)
            call = _call(run, name, "function", args, params, task, arrays, group.inputs, proceed)
            with compat.at(info), eqn.ctx.manager:
                return call, entry[1](call, *arrays, **params)

        def checked(call: TraceCall, result: Any) -> list[Any]:
            check_value(call, result, eqn.outvars[0].aval)
            return [result]

        if _ask(run, task, given, checked, group.inputs, arrays, info):
            return
    for one in gathered.tasks:
        run.run(one)


def _ask(
    run: Pass,
    task: Task,
    handler: Callable[[list[Any]], tuple[TraceCall, Any]],
    checked: Callable[[TraceCall, Any], list[Any]],
    atoms: Sequence[Any],
    values: list[Any],
    info: Any,
) -> bool:
    """Ask a handler, and continue with its results. Return whether it gave any.

    Args:
        handler: asks it about the operation of some operands. Returns the call, and its answer.
        checked: returns the results that the answer gives, flat.
    """
    linear = sorted(run.linear(atoms))
    if not linear:
        call, answer = handler(values)
        if call.given:
            _annotate(run, call, atoms, values)
        if answer is NotImplemented:
            return False
        _replace(run, call, task.eqn, checked(call, answer), call.is_own(answer))
        return True
    # JAX transposes what it finds here. So a handler's results are staged as one equation, whose
    # transpose is that of their derivative.
    call, answer, inner = None, None, list(values)

    def flat(*given: Any) -> list[Any]:
        nonlocal call, answer
        for i, value in zip(linear, given, strict=True):
            inner[i] = value
        call, answer = handler(inner)
        return [] if answer is NotImplemented else checked(call, answer)

    own = [values[i] for i in linear]
    types = [compat.typeof(value) for value in own]
    staged = Staged(*hoisted(*compat.stage(flat, types, compat.named_info("linear"))))
    assert call is not None
    _annotate(run, call, atoms, inner)
    if answer is NotImplemented:
        return False
    with compat.at(info):
        if call.is_own(answer) or not can_defer(staged):
            results = compat.as_function(staged.jaxpr)(*staged.more, *own)
        else:
            # It may round, and have a derivative that does not: only that is linear.
            function = Program(staged.jaxpr, is_from_handler=True)
            results = compat.deferred_p.bind(*staged.more, *own, function=function)
    _replace(run, call, task.eqn, results, call.is_own(answer))
    return True


def _let_run(run: Pass, task: Task, values: list[Any], info: Any, within: frozenset[str]) -> None:
    """Make an equation that its handler left, with what it holds tapped."""
    eqn = task.eqn
    if run.session.tapping.tasks.enters(eqn.primitive, eqn.params, len(values)):
        enter(run, task, values, info, within)
    elif not (run.frame.proxies and compute(run, task, values, info)):
        run.again(task, eqn, values, info)


def _proceed(run: Pass, task: Task, info: Any, *values: Any, **params: Any) -> Any:
    """Run a primitive for its handler: nothing in it is tapped."""
    eqn = task.eqn.replace(params=params)
    tasks = run.session.tapping.tasks
    if tasks.enters(eqn.primitive, params, len(values)):
        new = rebuild(run.around(task, untapped=True), eqn.primitive, params, values)
        eqn, values = eqn.replace(params=new.params), tuple(new.values)
    here = compat.info_of(eqn, info, compat.current_stack())
    own = [None if type(x) is compat.Literal else run.values.get(x) for x in eqn.invars]
    results = computed(run.frame, eqn, values, own) if run.frame.proxies else None
    if results is None:
        called = run.called(task.eqn, params, values)
        results = compat.rebind(eqn if called is task.eqn else called, values, here)
    return list(results) if eqn.primitive.multiple_results else results[0]


def _proceed_call(
    run: Pass,
    task: Task,
    marker: Marker,
    values: list[Any],
    info: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a function for its handler: nothing in it is tapped."""
    packed, closed = Packed((args, kwargs), ()), task.eqn.params["jaxpr"]
    avals = [var.aval for var in compat.open_of(closed).invars[marker.extra :]]
    key = marker.packed.key()
    if key is None or packed.key() != key or avals != list(map(compat.typeof, packed.arrays)):
        return marker.function(*args, **kwargs)
    # Same structure and types as when it was staged: the staged program does what the function
    # would, and the function itself may hold tracers of a trace that has ended.
    jaxpr, inner = compat.open_of(closed), inner_frame(run, task, closed, untapped=True)
    for i, (given, own) in enumerate(zip(packed.arrays, values[marker.extra :], strict=True)):
        if given is not own:  # another value of the handler, which has no array proxy
            inner.proxies.pop(jaxpr.invars[marker.extra + i], None)
    given = [*compat.consts_of(closed), *values[: marker.extra], *packed.arrays]
    here = compat.info_of(task.eqn, info, compat.current_stack())
    return marker.results.build(run.session.reinterpret(inner, jaxpr, given, here))


def _annotate(run: Pass, call: TraceCall, atoms: Sequence[Any], values: Sequence[Any]) -> None:
    """Keep the metadata that a handler attached to its arguments."""
    for atom, value in zip(atoms, values, strict=True):
        metadata = call.metadata_of(value)
        if metadata and type(atom) is not compat.Literal:
            run.frame.metadata[atom] = metadata


def _replace(run: Pass, call: TraceCall, eqn: Any, results: list[Any], is_own: bool) -> None:
    """Continue with a handler's results instead of the equation's."""
    run.frame.replace(eqn.outvars, is_own)
    for var, value in zip(eqn.outvars, results, strict=True):
        metadata = call.metadata_of(value)
        if metadata:
            run.frame.metadata[var] = metadata
    run.write(eqn.outvars, results)


def _call(
    run: Pass,
    name: str,
    level: str,
    args: tuple,
    params: Mapping[str, Any],
    task: Task,
    values: list[Any],
    atoms: Sequence[Any],
    proceed: Callable[..., Any],
) -> TraceCall:
    """Return what a handler is given for these arrays."""
    place, known = run.place(task), (run.frame, values, atoms)
    counted = run.count(task, name, bool(run.linear(atoms)))
    return TraceCall(name, level, args, params, place, counted, *known, proceed, run.session)
