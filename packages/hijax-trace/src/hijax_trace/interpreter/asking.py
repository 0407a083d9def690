"""Equations that a handler is asked about, and how its results replace theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from interception_core import TargetError

from .. import compat
from ..staging.marker import Marker, Packed, check_result, check_value
from .atoms import KnownAtoms, computed, variable
from .call import Place, TraceCall
from .entering import enter_held, entered, inline, inner_frame
from .moving import computes, follows
from .one_pass import Pass
from .tasks import Task


def ask(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Ask the handler of a primitive."""
    eqn, frame = task.eqn, run.frame
    name, handler = run.session.tapping.primitives[eqn.primitive]
    within = frame.within | task.within
    if frame.untapped:
        _let_run(run, task, values, info, within)
        return
    proceed = functools.partial(_proceed, run, task, info)
    call = _call(run, name, "primitive", tuple(values), eqn.params, task, values, 0, proceed)
    with compat.at(info), eqn.ctx.manager:
        result = handler(call, *values, **eqn.params)
    _annotate(run, call, eqn.invars, values)
    if result is NotImplemented:
        if not (frame.proxies and follows(run, task, values, info)):
            _let_run(run, task, values, info, within | {name})
        return
    results = list(result) if eqn.primitive.multiple_results else [result]
    if len(results) != len(eqn.outvars):
        raise TargetError(
            f"The handler of {call.op_id} returned {len(results)} results, but "
            f"{eqn.primitive.name} has {len(eqn.outvars)}."
        )
    for value, var in zip(results, eqn.outvars, strict=True):
        check_value(call, value, var.aval)
    _replace(run, call, eqn, results, call.is_own(result))


def ask_of_function(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Ask the handler of a function."""
    eqn, marker, within = task.eqn, task.marker, run.frame.within | task.within
    assert marker is not None
    entry = run.session.tapping.functions.get(marker.site)
    if run.frame.untapped or entry is None:
        inline(run, task, eqn.params["jaxpr"], values, info, within)
        return
    _, handler = entry
    arrays, atoms = values[marker.extra :], eqn.invars[marker.extra :]
    args, kwargs = marker.packed.build(arrays)
    proceed = functools.partial(_proceed_call, run, task, marker, values, info)
    call = _call(run, marker.op_name, "function", args, kwargs, task, arrays, marker.extra, proceed)
    with compat.at(info), eqn.ctx.manager:
        result = handler(call, *args, **kwargs)
    _annotate(run, call, atoms, arrays)
    if result is NotImplemented:
        within |= {marker.op_name}
        inline(run, task, eqn.params["jaxpr"], values, info, within)
        return
    avals = [var.aval for var in eqn.outvars]
    results = check_result(call, result, marker.results, avals)
    _replace(run, call, eqn, results, call.is_own(result))


def ask_of_group(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Ask the handler of a function that several equations write out."""
    gathered, frame = task.gathered, run.frame
    assert gathered is not None
    group, eqn = gathered.group, task.eqn
    entry = None if frame.untapped else run.session.tapping.functions.get(gathered.site)
    result: Any = NotImplemented
    if entry is not None:
        arrays = [run.values[var] for var in group.inputs]
        params = {"written": group.written, "also_used": group.also_used}
        number = run.number(task, group.name)
        place = Place(frame, task.scopes, frame.within | task.within, number)
        known = KnownAtoms(arrays, frame, group.inputs)

        def proceed(*values: Any, written: Any, also_used: Any) -> Any:
            return written(*values)

        call = TraceCall(
            group.name, "function", tuple(arrays), params, place, known, proceed, run.session
        )
        with compat.at(info), eqn.ctx.manager:
            result = entry[1](call, *arrays, **params)
        _annotate(run, call, group.inputs, arrays)
        if result is not NotImplemented:
            check_value(call, result, eqn.outvars[0].aval)
            _replace(run, call, eqn, [result], is_own=False)
            return
    for one in gathered.tasks:
        run.run(one)


def _let_run(run: Pass, task: Task, values: list[Any], info: Any, within: frozenset[str]) -> None:
    eqn = task.eqn
    if run.session.tapping.tasks.enters(eqn.primitive, eqn.params, len(values)):
        enter_held(run, task, values, info, within=within)
    elif not (run.frame.proxies and computes(run, task, values, info)):
        run.again(task, eqn, values, info)


def _proceed(run: Pass, task: Task, info: Any, *values: Any, **params: Any) -> Any:
    """Run a primitive for its handler: nothing in it is tapped."""
    eqn = task.eqn.replace(params=params)
    tasks = run.session.tapping.tasks
    if tasks.enters(eqn.primitive, params, len(values)):
        around = run.around(task, run.frame.within, untapped=True)
        new = entered(run, task, params, values, around)
        eqn, values = eqn.replace(params=new.params), tuple(new.values)
    here = compat.info_of(eqn, info, compat.current_stack())
    own = [run.values.get(variable(atom)) for atom in eqn.invars]
    results = computed(run.frame, eqn, values, own) if run.frame.proxies else None
    if results is None:
        results = compat.rebind(eqn, values, here)
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
    # What was staged is what the function does, and holds no value of the staging any more.
    inner = inner_frame(run, task, closed, run.frame.within, untapped=True)
    for i, (given, own) in enumerate(zip(packed.arrays, values[marker.extra :], strict=True)):
        if given is not own:  # a handler's, which no proxy stands for
            inner.proxies.pop(compat.open_of(closed).invars[marker.extra + i], None)
    given = [*compat.consts_of(closed), *values[: marker.extra], *packed.arrays]
    here = compat.info_of(task.eqn, info, compat.current_stack())
    jaxpr = compat.open_of(closed)
    return marker.results.build(run.reinterpret(run.session, inner, jaxpr, given, here))


def _annotate(run: Pass, call: TraceCall, atoms: Sequence[Any], values: Sequence[Any]) -> None:
    """Keep what a handler attached to its arguments."""
    if call.given:
        for atom, value in zip(atoms, values, strict=True):
            metadata = call.metadata_of(value)
            if metadata and type(atom) is not compat.Literal:
                run.frame.metadata[atom] = metadata


def _replace(run: Pass, call: TraceCall, eqn: Any, results: list[Any], is_own: bool) -> None:
    """Go on with a handler's results."""
    run.frame.replaced.update(eqn.outvars)
    if not is_own:
        run.frame.foreign.update(eqn.outvars)
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
    first: int,
    proceed: Callable[..., Any],
) -> TraceCall:
    frame, atoms = run.frame, task.eqn.invars[first:]
    number = run.number(task, name)
    place = Place(frame, task.scopes, frame.within | task.within, number)
    known = KnownAtoms(values, frame, atoms)
    return TraceCall(name, level, args, params, place, known, proceed, run.session)
