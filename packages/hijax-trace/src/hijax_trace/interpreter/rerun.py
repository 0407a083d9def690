"""Rerun: runs a staged program again, operation by operation, asking the handlers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interception_core import TargetError

from .. import _compat
from ..dataflow.dataflow import returned_views
from ..dataflow.expression import VIEWS, is_zero
from ..dataflow.flow import handed_on
from ..proxy.array_proxy import ArrayProxy, Lost, follow
from ..staging.mapped import mapped_in
from ..staging.marker import Marker, MarkerName, Packed, check_result, check_value
from .call import TraceCall
from .frames import Around, Frame, Notes, Operands
from .plan import Do, Step

if TYPE_CHECKING:
    from .bodies import Entered
    from .run import Run

_NOTHING: Notes = {}


def rerun(
    run: Run, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
) -> list[Any]:
    """Runs a jaxpr in the current trace.

    Args:
        run: the run.
        frame: what is known of its values.
        jaxpr: the jaxpr, open.
        values: of its constants and arguments.
        caller: the source of the call in whose place it is run. Its equations then have that
            instead of their own: JAX shares the jaxprs of equal calls.

    Returns:
        Its results.
    """
    return Rerun(run, frame, jaxpr, values, caller).results()


class Rerun:
    """One pass over a jaxpr.

    Where it is run to build another jaxpr, most equations are appended to that as they are: the
    types of their results are known. Only what depends on a value of another type than the
    original's (a handler may return one that is less weakly typed) is bound, as is everything
    in other traces.
    """

    def __init__(
        self, run: Run, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
    ):
        self.run = run
        self.frame = frame
        self._jaxpr = jaxpr
        self._trace = _compat.current_trace()
        self._caller = caller
        self._outer = _compat.current_stack() if caller is None else caller.name_stack
        self._appends = _compat.is_staging(self._trace) and not jaxpr.is_high
        self._changed: set[Any] = set()
        self._env: dict[Any, Any] = {}
        self._write(_compat.inputs_of(jaxpr), values)

    def results(self) -> list[Any]:
        """Runs the equations."""
        env, outer, literal, frame = self._env, self._outer, _compat.Literal, self.frame
        # What is staged costs nothing to keep; arrays are let go as soon as they can be.
        forget = {} if _compat.is_staging(self._trace) else _compat.forgettable(self._jaxpr)
        for position, step in enumerate(self.run.tapping.plans.steps(self._jaxpr)):
            eqn = step.eqn
            if frame.is_program:
                self.run.early.reach(position, self.run.numbers)
            values = [a.val if type(a) is literal else env[a] for a in eqn.invars]
            stack = step.stack
            if (step.settled or step.unused) and self.run.is_observed:
                stack = eqn.source_info.name_stack
            if len(outer):
                stack = outer + stack if len(stack) else outer
            info = _compat.info_of(eqn, self._caller, stack)
            if frame.proxies and self._moves(step, values, info):
                pass
            elif step.do is Do.PASS:
                self._again(step, eqn, values, info)
            else:
                silent, frame.silent = frame.silent, frame.silent or step.unused
                _ACTIONS[step.do](self, step, values, info)
                frame.silent = silent
            if (frame.notes or frame.proxies) and _compat.holds_jaxprs(eqn):
                self._hand_on(eqn)
            for var in forget.get(eqn, ()):
                env.pop(var, None)
        return [a.val if type(a) is literal else env[a] for a in self._jaxpr.outvars]

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for var, value in zip(variables, values, strict=True):
            self._env[var] = value
            if self._appends:
                aval = _compat.typeof(value)
                if aval is not var.aval and aval != var.aval:
                    self._changed.add(var)

    def _moves(self, step: Step, values: list[Any], info: Any) -> bool:
        """Makes an equation that moves what has an array proxy. Returns whether it did."""
        eqn, proxies = step.eqn, self.frame.proxies
        if step.do is not Do.PASS or not eqn.invars:
            return False
        held = [proxies.get(_variable(atom)) for atom in eqn.invars]
        if not any(held):
            return False
        if step.inlined or self._is_view(eqn, held):
            within = self.frame.within | step.within
            self._inline(step, eqn.params["jaxpr"], values, info, within)
            return True
        if eqn.primitive.name not in VIEWS:
            return False
        self._again(step, eqn, values, info)
        avals = [var.aval for var in eqn.outvars]

        def is_known_zero(i: int) -> bool:
            return is_zero(self.frame.expression(eqn.invars[i]))

        with _compat.at(info), eqn.ctx.manager:
            found = follow(eqn.primitive.name, eqn.params, values, held, avals, is_known_zero)
        proxies.update((v, proxy) for v, proxy in zip(eqn.outvars, found, strict=True) if proxy)
        return True

    def _hand_on(self, eqn: Any) -> None:
        """Keeps what is known of operands that a call, branch or loop returns."""
        frame = self.frame
        for i, operand in handed_on(eqn):
            if notes := _notes(frame, eqn.invars[operand]):
                frame.notes.setdefault(eqn.outvars[i], notes)
            if proxy := frame.proxies.get(_variable(eqn.invars[operand])):
                frame.proxies.setdefault(eqn.outvars[i], proxy)
        held = [_variable(atom) in frame.proxies for atom in eqn.invars]
        for i in returned_views(eqn, held) if any(held) else ():
            aval = eqn.outvars[i].aval
            why = f"{eqn.primitive.name} returns it. Use it where it is moved."
            frame.proxies.setdefault(eqn.outvars[i], Lost(aval.shape, aval.dtype, why))

    def _is_view(self, eqn: Any, held: Sequence[Any]) -> bool:
        """Returns whether an equation is the call of a function that moves what has a proxy."""
        if eqn.primitive is not _compat.jit_p:
            return False
        return bool(returned_views(eqn, [proxy is not None for proxy in held]))

    def _again(self, step: Step, eqn: Any, values: Sequence[Any], info: Any) -> None:
        """Makes an equation as it is."""
        make = None
        if self._appends:
            make = _compat.append if step.simple else _compat.inline if step.inlined else None
        if make is None or not self._changed.isdisjoint(map(_variable, eqn.invars)):
            self._write(eqn.outvars, _compat.rebind(eqn, values, info))
        else:
            self._env.update(zip(eqn.outvars, make(self._trace, eqn, values, info), strict=True))

    def _ask(self, step: Step, values: list[Any], info: Any) -> None:
        """Asks the handler of a primitive."""
        eqn, frame = step.eqn, self.frame
        name, handler = self.run.tapping.primitives[eqn.primitive]
        within = frame.within | step.within
        if frame.silent:
            self._let_run(step, values, info, within)
            return
        proceed = functools.partial(self._proceed, step, info)
        call = self._call(name, "primitive", tuple(values), eqn.params, step, values, 0, proceed)
        with _compat.at(info), eqn.ctx.manager:
            result = handler(call, *values, **eqn.params)
        self._annotate(call, eqn.invars, values)
        if result is NotImplemented:
            self._let_run(step, values, info, within | {name})
            return
        results = list(result) if eqn.primitive.multiple_results else [result]
        if len(results) != len(eqn.outvars):
            raise TargetError(
                f"The handler of {call.op_id} returned {len(results)} results, but "
                f"{eqn.primitive.name} has {len(eqn.outvars)}."
            )
        for value, var in zip(results, eqn.outvars, strict=True):
            check_value(call, value, var.aval)
        self._replace(call, eqn, results, call.is_own(result))

    def _let_run(self, step: Step, values: list[Any], info: Any, within: frozenset[str]) -> None:
        eqn = step.eqn
        if self.run.tapping.plans.enters(eqn.primitive, eqn.params, len(values)):
            self._enter(step, values, info, within=within)
        else:
            self._again(step, eqn, values, info)

    def _proceed(self, step: Step, info: Any, *values: Any, **params: Any) -> Any:
        """Runs a primitive for its handler: nothing in it is tapped."""
        eqn = step.eqn.replace(params=params)
        plans = self.run.tapping.plans
        if plans.enters(eqn.primitive, params, len(values)):
            around = self._around(step, self.frame.within, silent=True)
            new = self.run.enter(around, eqn.primitive, params, values, self._operands(eqn))
            eqn, values = eqn.replace(params=new.params), tuple(new.values)
        here = _compat.info_of(eqn, info, _compat.current_stack())
        results = _compat.rebind(eqn, values, here)
        return list(results) if eqn.primitive.multiple_results else results[0]

    def _marker(self, step: Step, values: list[Any], info: Any) -> None:
        """Asks the handler of a function."""
        eqn, marker, within = step.eqn, step.marker, self.frame.within | step.within
        assert marker is not None
        entry = self.run.tapping.functions.get(marker.site)
        if self.frame.silent or entry is None:
            self._inline(step, eqn.params["jaxpr"], values, info, within)
            return
        _, handler = entry
        arrays, atoms = values[marker.extra :], eqn.invars[marker.extra :]
        args, kwargs = marker.packed.build(arrays)
        proceed = functools.partial(self._proceed_call, step, marker, values, info)
        call = self._call(
            marker.op_name, "function", args, kwargs, step, arrays, marker.extra, proceed
        )
        with _compat.at(info), eqn.ctx.manager:
            result = handler(call, *args, **kwargs)
        self._annotate(call, atoms, arrays)
        if result is NotImplemented:
            within |= {marker.op_name}
            self._inline(step, eqn.params["jaxpr"], values, info, within)
            return
        avals = [var.aval for var in eqn.outvars]
        results = check_result(call, result, marker.results, avals)
        self._replace(call, eqn, results, call.is_own(result))

    def _proceed_call(
        self, step: Step, marker: Marker, values: list[Any], info: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a function for its handler: nothing in it is tapped."""
        packed, closed = Packed((args, kwargs), ()), step.eqn.params["jaxpr"]
        avals = [var.aval for var in _compat.open_of(closed).invars[marker.extra :]]
        key = marker.packed.key()
        if key is None or packed.key() != key or avals != list(map(_compat.typeof, packed.arrays)):
            return marker.function(*args, **kwargs)
        # What was staged is what the function does, and holds no value of the staging any more.
        inner = self._inner(step, closed, self.frame.within, silent=True)
        given = [*_compat.consts_of(closed), *values[: marker.extra], *packed.arrays]
        here = _compat.info_of(step.eqn, info, _compat.current_stack())
        jaxpr = _compat.open_of(closed)
        return marker.results.build(rerun(self.run, inner, jaxpr, given, here))

    def _inline(
        self, step: Step, closed: Any, values: list[Any], info: Any, within: frozenset[str]
    ) -> None:
        """Runs what an equation stands for in its place."""
        eqn, frame, jaxpr = step.eqn, self.frame, _compat.open_of(closed)
        inner = self._inner(step, closed, within, frame.silent)
        results = rerun(self.run, inner, jaxpr, _compat.consts_of(closed) + values, info)
        for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
            if type(atom) is _compat.Literal:
                continue
            if atom in inner.notes:
                frame.notes[var] = inner.notes[atom]
            if atom in inner.proxies:
                frame.proxies[var] = inner.proxies[atom]
        _join(frame, eqn, inner)
        self._write(eqn.outvars, results)

    def _inner(self, step: Step, closed: Any, within: frozenset[str], silent: bool) -> Frame:
        """Returns the frame of what an equation stands for."""
        frame, operands = self.frame, self._operands(step.eqn)
        path = frame.silent_path(step.scopes)
        jaxpr = _compat.open_of(closed)
        known = (operands.origins, operands.notes)
        where = (path, frame.label, within, silent, frame)
        return Frame(
            jaxpr,
            *known,
            *where,
            operands.proxies,
            operands.expressions,
            _compat.consts_of(closed),
            frame.depth,
        )

    def _others(self, step: Step, values: list[Any], info: Any) -> None:
        """Makes another interceptor's marker again, with what it stands for tapped."""
        marker, eqn = step.marker, step.eqn
        assert marker is not None
        if not self.run.tapping.plans.wants(eqn.params["jaxpr"]):
            self._write(eqn.outvars, _compat.rebind(eqn, values, info))
            return
        around = self._around(step, self.frame.within, self.frame.silent)
        new = self.run.enter(around, eqn.primitive, eqn.params, values, self._operands(eqn))
        again = Marker(
            marker.owner,
            marker.op_name,
            marker.site,
            self.run.tapping.rewrap(marker.function),
            marker.packed,
            marker.results,
            marker.extra + len(new.values) - len(values),
        )
        name = MarkerName.of(again, new.params["jaxpr"])
        self._emit(step, eqn, new._replace(params={**new.params, "name": name}), info)

    def _enter(
        self,
        step: Step,
        values: list[Any],
        info: Any,
        within: frozenset[str] | None = None,
    ) -> None:
        """Makes an equation with what it holds tapped."""
        eqn, frame = step.eqn, self.frame
        if step.inlined and self._appends:
            within = (within or frame.within) | step.within
            self._inline(step, eqn.params["jaxpr"], values, info, within)
            return
        around = self._around(step, frame.within if within is None else within, frame.silent)
        new = self.run.enter(around, eqn.primitive, eqn.params, values, self._operands(eqn))
        self._emit(step, eqn, new, info)

    def _custom(self, step: Step, values: list[Any], info: Any) -> None:
        """Makes the call of a function with rules of its own, with it and them tapped."""
        eqn, frame = step.eqn, self.frame
        around = self._around(step, frame.within, frame.silent)
        new = self.run.custom(around, eqn.params, values, self._operands(eqn))
        self._emit(step, eqn, new, info)

    def _mapped(self, step: Step, values: list[Any], info: Any) -> None:
        """Maps what an equation was before JAX has mapped it, with that tapped."""
        eqn, frame = step.eqn, self.frame
        mapped, operands = mapped_in(eqn.primitive, eqn.params), self._operands(eqn)
        assert mapped is not None
        jaxpr, consts = _compat.open_of(mapped.jaxpr), _compat.consts_of(mapped.jaxpr)
        origins = [
            functools.partial(mapped.origin, i, resolve, aval)
            for i, (resolve, aval) in enumerate(zip(operands.origins, operands.avals, strict=True))
        ]
        inner: Frame | None = None

        def one(values: list[Any], proxies: Mapping[int, ArrayProxy]) -> list[Any]:
            nonlocal inner
            inner = Frame(
                jaxpr,
                origins,
                operands.notes,
                frame.silent_path(step.scopes),
                frame.label,
                frame.within | step.within,
                frame.silent,
                frame,
                proxies,
                mapped.expressions(operands.expressions, jaxpr, frame.depth),
                consts,
                frame.depth + len(mapped.levels),
            )
            return rerun(self.run, inner, jaxpr, [*consts, *values], info)

        with _compat.at(info), eqn.ctx.manager:
            results = mapped.run(one, values, operands.proxies)
        assert inner is not None
        for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
            if notes := _notes(inner, atom):
                frame.notes[var] = notes
        _join(frame, eqn, inner)
        self._write(eqn.outvars, results)

    def _emit(self, step: Step, eqn: Any, new: Any, info: Any) -> None:
        for i, note in new.notes.items():
            self.frame.notes[eqn.outvars[i]] = note
        _join(self.frame, eqn, new)
        again = eqn.replace(params=new.params)
        if len(new.values) == len(eqn.invars) and not _compat.has_effects(new.params):
            self._again(step, again, new.values, info)
        else:
            self._write(eqn.outvars, _compat.rebind(again, new.values, info))

    def _annotate(self, call: TraceCall, atoms: Sequence[Any], values: Sequence[Any]) -> None:
        """Keeps what a handler attached to its arguments."""
        if call.given:
            for atom, value in zip(atoms, values, strict=True):
                notes = call.notes_of(value)
                if notes and type(atom) is not _compat.Literal:
                    self.frame.notes[atom] = notes

    def _replace(self, call: TraceCall, eqn: Any, results: list[Any], is_own: bool) -> None:
        """Goes on with a handler's results."""
        self.frame.replaced.update(eqn.outvars)
        if not is_own:
            self.frame.foreign.update(eqn.outvars)
        for var, value in zip(eqn.outvars, results, strict=True):
            notes = call.notes_of(value)
            if notes:
                self.frame.notes[var] = notes
        self._write(eqn.outvars, results)

    def _call(
        self,
        name: str,
        level: str,
        args: tuple,
        params: Mapping[str, Any],
        step: Step,
        values: list[Any],
        first: int,
        proceed: Callable[..., Any],
    ) -> TraceCall:
        frame, atoms = self.frame, step.eqn.invars[first:]
        number = self.run.numbers.next(frame.silent_path(step.scopes), frame.label, name)
        return TraceCall(
            name,
            level,
            args,
            params,
            step.scopes,
            number,
            frame,
            values,
            lambda i: frame.origin(atoms[i]),
            lambda i: _notes(frame, atoms[i]),
            lambda i: frame.proxies.get(_variable(atoms[i])),
            lambda i: frame.expression(atoms[i]),
            frame.within | step.within,
            proceed,
            self.run,
        )

    def _around(self, step: Step, within: frozenset[str], silent: bool) -> Around:
        return Around(self.frame, step.scopes, within | step.within, silent)

    def _operands(self, eqn: Any) -> Operands:
        frame = self.frame
        notes = {i: note for i, atom in enumerate(eqn.invars) if (note := _notes(frame, atom))}
        origins = [functools.partial(frame.origin, atom) for atom in eqn.invars]
        proxies = {}
        if frame.proxies:
            found = [frame.proxies.get(_variable(atom)) for atom in eqn.invars]
            proxies = {i: held for i, held in enumerate(found) if held is not None}
        expressions = [functools.partial(frame.expression, atom) for atom in eqn.invars]
        return Operands([atom.aval for atom in eqn.invars], origins, notes, proxies, expressions)


def _join(frame: Frame, eqn: Any, inner: Frame | Entered) -> None:
    """Takes over whether anything was replaced in what an equation holds."""
    if inner.replaced:
        frame.replaced.update(eqn.outvars)
    if inner.foreign:
        frame.foreign.update(eqn.outvars)


def _variable(atom: Any) -> Any:
    return None if type(atom) is _compat.Literal else atom


def _notes(frame: Frame, atom: Any) -> Notes:
    return _NOTHING if type(atom) is _compat.Literal else frame.notes.get(atom, _NOTHING)


_ACTIONS: dict[Do, Callable[[Rerun, Step, list[Any], Any], None]] = {
    Do.ASK: Rerun._ask,
    Do.MARKER: Rerun._marker,
    Do.OTHERS: Rerun._others,
    Do.ENTER: Rerun._enter,
    Do.CUSTOM: Rerun._custom,
    Do.MAPPED: Rerun._mapped,
}
