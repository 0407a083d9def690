"""Interpreter: runs a staged program again, operation by operation, asking the handlers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from interception_core import TargetError

from .. import compat
from ..dataflow.dataflow import returned_views
from ..dataflow.flow import handed_on
from ..proxy.array_proxy import Lost
from ..staging.mapped import Level, mapped_in
from ..staging.marker import Marker, MarkerName, Packed, check_result, check_value
from ..state.held import held_in
from .apart import Apart, Derivatives, Linear, Once
from .atoms import KnownAtoms, carry, computed, followed, hand_on, metadata_of, variable
from .bodies import Entered, custom, enter
from .call import Place, TraceCall
from .frames import Around, Frame, Operands
from .session import Session
from .tasks import Do, Task


def reinterpret(
    session: Session, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
) -> list[Any]:
    """Run a jaxpr in the current trace.

    Args:
        session: the call of the wrapped function that this is for.
        frame: what is known of its values.
        jaxpr: the jaxpr, open.
        values: of its constants and arguments.
        caller: the source of the call in whose place it is run. Its equations then have that
            instead of their own: JAX shares the jaxprs of equal calls.

    Returns:
        Its results.
    """
    return Interpreter(session, frame, jaxpr, values, caller).results()


class Interpreter:
    """One pass over a jaxpr.

    Where it is run to build another jaxpr, most equations are appended to that as they are: the
    types of their results are known. Only what depends on a value of another type than the
    original's (a handler may return one that is less weakly typed) is bound, as is everything
    in other traces.
    """

    def __init__(
        self, session: Session, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
    ):
        self.session = session
        self.frame = frame
        self._jaxpr = jaxpr
        self._trace = compat.current_trace()
        self._caller = caller
        self._outer = compat.current_stack() if caller is None else caller.name_stack
        self._appends = compat.is_staging(self._trace) and not jaxpr.is_high
        self._derivatives: Derivatives | None = None
        self._changed: set[Any] = set()
        self._env: dict[Any, Any] = {}
        self._write(compat.inputs_of(jaxpr), values)

    def results(self) -> list[Any]:
        """Run the equations."""
        env, literal, frame = self._env, compat.Literal, self.frame
        # What is staged costs nothing to keep; arrays are let go as soon as they can be.
        forget = {} if compat.is_staging(self._trace) else compat.forgettable(self._jaxpr)
        tasks = self.session.tapping.tasks.tasks(self._jaxpr)
        if any(task.do is Do.GROUP for task in tasks):
            forget = {}  # groups are run later than they are written
        for position, task in enumerate(tasks):
            if frame.is_program:
                self.session.reach(position)
            if task.do is not Do.LATER:
                self._run(task)
            for var in forget.get(task.eqn, ()):
                env.pop(var, None)
        return [a.val if type(a) is literal else env[a] for a in self._jaxpr.outvars]

    def _run(self, task: Task) -> None:
        """Run one equation."""
        eqn, frame, outer = task.eqn, self.frame, self._outer
        # The last of a group may have operands that are made if its handler leaves it.
        atoms = () if task.do is Do.GROUP else eqn.invars
        values = [a.val if type(a) is compat.Literal else self._env[a] for a in atoms]
        stack = task.stack
        if (task.settled or task.unused) and self.session.is_observed:
            stack = eqn.source_info.name_stack
        if len(outer):
            stack = outer + stack if len(stack) else outer
        info = compat.info_of(eqn, self._caller, stack)
        if frame.proxies and self._moves(task, values, info):
            pass
        elif task.do is Do.PASS:
            self._again(task, eqn, values, info)
        else:
            untapped, frame.untapped = frame.untapped, frame.untapped or task.unused
            _ACTIONS[task.do](self, task, values, info)
            frame.untapped = untapped
        if (frame.metadata or frame.proxies) and compat.holds_jaxprs(eqn):
            hand_on(frame, eqn)
        if frame.proxies:
            carry(frame, eqn)

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for var, value in zip(variables, values, strict=True):
            self._env[var] = value
            if self._appends:
                aval = compat.typeof(value)
                if aval is not var.aval and aval != var.aval:
                    self._changed.add(var)

    def _moves(self, task: Task, values: list[Any], info: Any) -> bool:
        """Make an equation that moves what has an array proxy. Return whether it did."""
        eqn, proxies = task.eqn, self.frame.proxies
        if task.do is not Do.PASS or not eqn.invars:
            return False
        held = [proxies.get(variable(atom)) for atom in eqn.invars]
        if not any(held):
            return False
        if task.inlined or self._is_view(eqn, held):
            within = self.frame.within | task.within
            self._inline(task, eqn.params["jaxpr"], values, info, within)
            return True
        return self._follows(task, values, info) or self._computes(task, values, info)

    def _computes(self, task: Task, values: list[Any], info: Any) -> bool:
        """Make an equation by what the array proxies of its operands compute, if they do."""
        eqn, frame = task.eqn, self.frame
        if compat.holds_jaxprs(eqn):
            return False
        with compat.at(info), eqn.ctx.manager:
            results = computed(frame, eqn, values, values)
        if results is None:
            return False
        frame.replaced.update(eqn.outvars)
        self._write(eqn.outvars, results)
        return True

    def _held(self, task: Task, values: list[Any], info: Any) -> None:
        """Take an array from the proxy that the program carries."""
        eqn = task.eqn
        proxy = held_in(eqn.primitive, eqn.params, values)
        assert proxy is not None
        with compat.at(info), eqn.ctx.manager:
            array = proxy.restore().astype(eqn.outvars[0].aval.dtype)
        self.frame.proxies[eqn.outvars[0]] = proxy
        self._write(eqn.outvars, [array])

    def _follows(self, task: Task, values: list[Any], info: Any) -> bool:
        """Make an equation that moves elements, with the array proxies of its operands."""
        eqn, frame = task.eqn, self.frame
        with compat.at(info), eqn.ctx.manager:
            found = followed(frame, eqn, values)
            if found is None:
                return False
            looked_up = found[0] if eqn.primitive.name == "gather" else None
            is_array = looked_up is not None and not isinstance(looked_up, Lost)
            if is_array:
                # Rows of a table: those that are needed alone, not the table, become an array.
                self._write(eqn.outvars, [looked_up.restore().astype(eqn.outvars[0].aval.dtype)])
        if not is_array:
            self._again(task, eqn, values, info)
        pairs = zip(eqn.outvars, found, strict=True)
        frame.proxies.update((var, proxy) for var, proxy in pairs if proxy)
        return True

    def _is_view(self, eqn: Any, held: Sequence[Any]) -> bool:
        """Return whether an equation is the call of a function that moves what has a proxy."""
        if eqn.primitive is not compat.jit_p:
            return False
        return bool(returned_views(eqn, [proxy is not None for proxy in held]))

    def _returns_proxy(self, eqn: Any) -> bool:
        """Return whether an equation is the call of a function that returns what it has moved.

        What it returns as it was given needs no care: see ``hand_on``.
        """
        proxies = self.frame.proxies
        if not proxies or eqn.primitive is not compat.jit_p:
            return False
        views = returned_views(eqn, [variable(atom) in proxies for atom in eqn.invars])
        return not set(views) <= {i for i, _ in handed_on(eqn)}

    def _again(self, task: Task, eqn: Any, values: Sequence[Any], info: Any) -> None:
        """Make an equation as it is."""
        make = None
        if self._appends:
            make = compat.append if task.simple else compat.inline if task.inlined else None
        changed = self._changed
        if make is None or (changed and not changed.isdisjoint(map(variable, eqn.invars))):
            self._write(eqn.outvars, compat.rebind(eqn, values, info))
        else:
            self._env.update(zip(eqn.outvars, make(self._trace, eqn, values, info), strict=True))

    def _ask(self, task: Task, values: list[Any], info: Any) -> None:
        """Ask the handler of a primitive."""
        eqn, frame = task.eqn, self.frame
        name, handler = self.session.tapping.primitives[eqn.primitive]
        within = frame.within | task.within
        if frame.untapped:
            self._let_run(task, values, info, within)
            return
        proceed = functools.partial(self._proceed, task, info)
        call = self._call(name, "primitive", tuple(values), eqn.params, task, values, 0, proceed)
        with compat.at(info), eqn.ctx.manager:
            result = handler(call, *values, **eqn.params)
        self._annotate(call, eqn.invars, values)
        if result is NotImplemented:
            if not (frame.proxies and self._follows(task, values, info)):
                self._let_run(task, values, info, within | {name})
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

    def _let_run(self, task: Task, values: list[Any], info: Any, within: frozenset[str]) -> None:
        eqn = task.eqn
        if self.session.tapping.tasks.enters(eqn.primitive, eqn.params, len(values)):
            self._enter(task, values, info, within=within)
        elif not (self.frame.proxies and self._computes(task, values, info)):
            self._again(task, eqn, values, info)

    def _proceed(self, task: Task, info: Any, *values: Any, **params: Any) -> Any:
        """Run a primitive for its handler: nothing in it is tapped."""
        eqn = task.eqn.replace(params=params)
        tasks = self.session.tapping.tasks
        if tasks.enters(eqn.primitive, params, len(values)):
            around = self._around(task, self.frame.within, untapped=True)
            new = enter(
                reinterpret,
                self.session,
                around,
                eqn.primitive,
                params,
                values,
                self._operands(eqn),
            )
            eqn, values = eqn.replace(params=new.params), tuple(new.values)
        here = compat.info_of(eqn, info, compat.current_stack())
        own = [self._env.get(variable(atom)) for atom in eqn.invars]
        results = computed(self.frame, eqn, values, own) if self.frame.proxies else None
        if results is None:
            results = compat.rebind(eqn, values, here)
        return list(results) if eqn.primitive.multiple_results else results[0]

    def _marker(self, task: Task, values: list[Any], info: Any) -> None:
        """Ask the handler of a function."""
        eqn, marker, within = task.eqn, task.marker, self.frame.within | task.within
        assert marker is not None
        entry = self.session.tapping.functions.get(marker.site)
        if self.frame.untapped or entry is None:
            self._inline(task, eqn.params["jaxpr"], values, info, within)
            return
        _, handler = entry
        arrays, atoms = values[marker.extra :], eqn.invars[marker.extra :]
        args, kwargs = marker.packed.build(arrays)
        proceed = functools.partial(self._proceed_call, task, marker, values, info)
        call = self._call(
            marker.op_name, "function", args, kwargs, task, arrays, marker.extra, proceed
        )
        with compat.at(info), eqn.ctx.manager:
            result = handler(call, *args, **kwargs)
        self._annotate(call, atoms, arrays)
        if result is NotImplemented:
            within |= {marker.op_name}
            self._inline(task, eqn.params["jaxpr"], values, info, within)
            return
        avals = [var.aval for var in eqn.outvars]
        results = check_result(call, result, marker.results, avals)
        self._replace(call, eqn, results, call.is_own(result))

    def _group(self, task: Task, values: list[Any], info: Any) -> None:
        """Ask the handler of a function that several equations write out."""
        gathered, frame = task.gathered, self.frame
        assert gathered is not None
        group, eqn = gathered.group, task.eqn
        entry = None if frame.untapped else self.session.tapping.functions.get(gathered.site)
        result: Any = NotImplemented
        if entry is not None:
            arrays = [self._env[var] for var in group.inputs]
            params = {"written": group.written, "also_used": group.also_used}
            number = self._number(task, group.name)
            place = Place(frame, task.scopes, frame.within | task.within, number)
            known = KnownAtoms(arrays, frame, group.inputs)

            def proceed(*values: Any, written: Any, also_used: Any) -> Any:
                return written(*values)

            call = TraceCall(
                group.name, "function", tuple(arrays), params, place, known, proceed, self.session
            )
            with compat.at(info), eqn.ctx.manager:
                result = entry[1](call, *arrays, **params)
            self._annotate(call, group.inputs, arrays)
            if result is not NotImplemented:
                check_value(call, result, eqn.outvars[0].aval)
                self._replace(call, eqn, [result], is_own=False)
                return
        for one in gathered.tasks:
            self._run(one)

    def _proceed_call(
        self,
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
        inner = self._inner(task, closed, self.frame.within, untapped=True)
        for i, (given, own) in enumerate(zip(packed.arrays, values[marker.extra :], strict=True)):
            if given is not own:  # a handler's, which no proxy stands for
                inner.proxies.pop(compat.open_of(closed).invars[marker.extra + i], None)
        given = [*compat.consts_of(closed), *values[: marker.extra], *packed.arrays]
        here = compat.info_of(task.eqn, info, compat.current_stack())
        jaxpr = compat.open_of(closed)
        return marker.results.build(reinterpret(self.session, inner, jaxpr, given, here))

    def _inline(
        self, task: Task, closed: Any, values: list[Any], info: Any, within: frozenset[str]
    ) -> None:
        """Run what an equation stands for in its place."""
        eqn, frame, jaxpr = task.eqn, self.frame, compat.open_of(closed)
        inner = self._inner(task, closed, within, frame.untapped)
        results = reinterpret(self.session, inner, jaxpr, compat.consts_of(closed) + values, info)
        for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
            if type(atom) is compat.Literal:
                continue
            if atom in inner.metadata:
                frame.metadata[var] = inner.metadata[atom]
            if atom in inner.proxies:
                frame.proxies[var] = inner.proxies[atom]
        _join(frame, eqn, inner)
        self._write(eqn.outvars, results)

    def _inner(self, task: Task, closed: Any, within: frozenset[str], untapped: bool) -> Frame:
        """Return the frame of what an equation stands for."""
        frame, operands = self.frame, self._operands(task.eqn)
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

    def _others(self, task: Task, values: list[Any], info: Any) -> None:
        """Make another interceptor's marker again, with what it stands for tapped."""
        marker, eqn = task.marker, task.eqn
        assert marker is not None
        if not self.session.tapping.tasks.wants(eqn.params["jaxpr"]):
            self._write(eqn.outvars, compat.rebind(eqn, values, info))
            return
        around = self._around(task, self.frame.within, self.frame.untapped)
        new = enter(
            reinterpret,
            self.session,
            around,
            eqn.primitive,
            eqn.params,
            values,
            self._operands(eqn),
        )
        again = Marker(
            marker.owner,
            marker.op_name,
            marker.site,
            self.session.tapping.rewrap(marker.function),
            marker.packed,
            marker.results,
            marker.extra + len(new.values) - len(values),
        )
        name = MarkerName.of(again, new.params["jaxpr"])
        self._emit(task, eqn, new._replace(params={**new.params, "name": name}), info)

    def _enter(
        self,
        task: Task,
        values: list[Any],
        info: Any,
        within: frozenset[str] | None = None,
    ) -> None:
        """Make an equation with what it holds tapped."""
        eqn, frame = task.eqn, self.frame
        if (task.inlined and self._appends) or self._returns_proxy(eqn):
            within = (within or frame.within) | task.within
            self._inline(task, eqn.params["jaxpr"], values, info, within)
            return
        around = self._around(task, frame.within if within is None else within, frame.untapped)
        new = enter(
            reinterpret,
            self.session,
            around,
            eqn.primitive,
            eqn.params,
            values,
            self._operands(eqn),
        )
        self._emit(task, eqn, new, info)

    def _custom(self, task: Task, values: list[Any], info: Any) -> None:
        """Make the call of a function with rules of its own, with it and them tapped."""
        eqn, frame = task.eqn, self.frame
        around = self._around(task, frame.within, frame.untapped)
        new = custom(reinterpret, self.session, around, eqn.params, values, self._operands(eqn))
        self._emit(task, eqn, new, info)

    def _mapped(self, task: Task, values: list[Any], info: Any) -> None:
        """Map what an equation was before JAX has mapped it, with that tapped."""
        eqn, operands = task.eqn, self._operands(task.eqn)
        mapped = mapped_in(eqn.primitive, eqn.params)
        assert mapped is not None
        apart = self._apart(task, mapped.jaxpr, mapped.levels, operands, info)
        with compat.at(info), eqn.ctx.manager:
            results = mapped.run(apart.run, values, operands.proxies)
        self._finish(eqn, apart.frame, results, mapped.jaxpr)

    def _kept(self, task: Task, values: list[Any], info: Any) -> None:
        """Make an equation of the program that JAX has derived it from, with that tapped."""
        eqn, operands = task.eqn, self._operands(task.eqn)
        function, program = eqn.params["function"], eqn.params["function"].program
        if self._derivatives is None:
            self._derivatives = Derivatives(self._jaxpr)
        derivatives = self._derivatives
        if function is program and derivatives.is_alone(program):
            within = self.frame.within | task.within
            self._inline(task, program.jaxpr, values, info, within)
            return
        made, derivative = derivatives.linear(eqn), derivatives.of(eqn)
        # A derivative does again what was made of the function: its handlers were asked for that.
        kept = derivatives.program(eqn) or self.session.kept.get(program)
        once = kept if made is None else made.once
        if once is None or not function.is_derived:
            is_known = function.places == list(range(len(function.places)))
            levels, closed = function.levels, program.jaxpr
            once = Once(self._apart(task, closed, levels, operands, info, is_known))
            self.session.kept[program] = once
            derivatives.keep_program(eqn, once)
        with compat.at(info), eqn.ctx.manager:
            if made is not None:
                results = made.call(values[made.count :])
            elif derivative is None:
                results = function.run(once.run, values, operands.proxies)
            else:
                results, call = derivative.split(once.run, values, operands.proxies)
                derivatives.keep(derivative, eqn, Linear(len(values), call, once))
        self._finish(eqn, once.frame, results, None if function.is_derived else program.jaxpr)

    def _apart(
        self,
        task: Task,
        closed: Any,
        levels: Sequence[Level],
        operands: Operands,
        info: Any,
        is_known: bool = True,
    ) -> Apart:
        """Return what an equation was before JAX has transformed it."""

        def run(frame: Frame, jaxpr: Any, values: list[Any]) -> list[Any]:
            return reinterpret(self.session, frame, jaxpr, values, info)

        around = self._around(task, self.frame.within, self.frame.untapped)
        return Apart(run, around, closed, levels, operands, is_known)

    def _finish(
        self, eqn: Any, inner: Frame | None, results: list[Any], closed: Any = None
    ) -> None:
        """Go on with what an equation was, made again; with its results, if they are this one's."""
        assert inner is not None
        atoms = [] if closed is None else compat.open_of(closed).outvars
        for var, atom in zip(eqn.outvars, atoms, strict=False):
            if metadata := metadata_of(inner, atom):
                self.frame.metadata[var] = metadata
        _join(self.frame, eqn, inner)
        self._write(eqn.outvars, results)

    def _emit(self, task: Task, eqn: Any, new: Any, info: Any) -> None:
        for i, note in new.metadata.items():
            self.frame.metadata[eqn.outvars[i]] = note
        _join(self.frame, eqn, new)
        again = eqn.replace(params=new.params)
        if len(new.values) == len(eqn.invars) and not compat.has_effects(new.params):
            self._again(task, again, new.values, info)
        else:
            self._write(eqn.outvars, compat.rebind(again, new.values, info))

    def _annotate(self, call: TraceCall, atoms: Sequence[Any], values: Sequence[Any]) -> None:
        """Keep what a handler attached to its arguments."""
        if call.given:
            for atom, value in zip(atoms, values, strict=True):
                metadata = call.metadata_of(value)
                if metadata and type(atom) is not compat.Literal:
                    self.frame.metadata[atom] = metadata

    def _replace(self, call: TraceCall, eqn: Any, results: list[Any], is_own: bool) -> None:
        """Go on with a handler's results."""
        self.frame.replaced.update(eqn.outvars)
        if not is_own:
            self.frame.foreign.update(eqn.outvars)
        for var, value in zip(eqn.outvars, results, strict=True):
            metadata = call.metadata_of(value)
            if metadata:
                self.frame.metadata[var] = metadata
        self._write(eqn.outvars, results)

    def _call(
        self,
        name: str,
        level: str,
        args: tuple,
        params: Mapping[str, Any],
        task: Task,
        values: list[Any],
        first: int,
        proceed: Callable[..., Any],
    ) -> TraceCall:
        frame, atoms = self.frame, task.eqn.invars[first:]
        number = self._number(task, name)
        place = Place(frame, task.scopes, frame.within | task.within, number)
        known = KnownAtoms(values, frame, atoms)
        return TraceCall(name, level, args, params, place, known, proceed, self.session)

    def _number(self, task: Task, name: str) -> int:
        frame = self.frame
        return self.session.numbers.next(frame.own_path(task.scopes), frame.label, name)

    def _around(self, task: Task, within: frozenset[str], untapped: bool) -> Around:
        return Around(self.frame, task.scopes, within | task.within, untapped)

    def _operands(self, eqn: Any) -> Operands:
        frame = self.frame
        metadata = {}
        if frame.metadata:
            found = [metadata_of(frame, atom) for atom in eqn.invars]
            metadata = {i: note for i, note in enumerate(found) if note}
        origins = [functools.partial(frame.origin, atom) for atom in eqn.invars]
        proxies = {}
        if frame.proxies:
            found = [frame.proxies.get(variable(atom)) for atom in eqn.invars]
            proxies = {i: held for i, held in enumerate(found) if held is not None}
        expressions = [functools.partial(frame.own_expression, atom) for atom in eqn.invars]
        return Operands([atom.aval for atom in eqn.invars], origins, metadata, proxies, expressions)


def _join(frame: Frame, eqn: Any, inner: Frame | Entered) -> None:
    """Take over whether anything was replaced in what an equation holds."""
    if inner.replaced:
        frame.replaced.update(eqn.outvars)
    if inner.foreign:
        frame.foreign.update(eqn.outvars)


_ACTIONS: dict[Do, Callable[[Interpreter, Task, list[Any], Any], None]] = {
    Do.ASK: Interpreter._ask,
    Do.MARKER: Interpreter._marker,
    Do.OTHERS: Interpreter._others,
    Do.ENTER: Interpreter._enter,
    Do.CUSTOM: Interpreter._custom,
    Do.MAPPED: Interpreter._mapped,
    Do.KEPT: Interpreter._kept,
    Do.GROUP: Interpreter._group,
    Do.HELD: Interpreter._held,
}
