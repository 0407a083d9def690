"""Early: what meets grad and its like while the program is still being staged.

What is differentiated inside the wrapped function can't be told from its derivative afterwards,
so a handler is asked at once, before the transformation's own rule. What it, and the rules, leave
behind in the staged program is marked by a name scope, and passed later on. What is only mapped
can wait (see ``mapped``), but for calls with objects among their arguments.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from interception_core.engine_api import settled

from .. import _compat
from ..dataflow.axes import dropped
from ..dataflow.flow import move_of
from ..proxy.array_proxy import ArrayProxy, follow
from ..staging.marker import Marker, check_result, marker_in
from .call import TraceCall
from .frames import Around, Frame, Key, Notes, Numbers, Operands, Origin
from .plan import OURS, WITHIN
from .rerun import rerun

if TYPE_CHECKING:
    from .run import Run

_NOTHING: Notes = {}


def _no_trace() -> None:
    """Stands for the weak reference to the program's trace before and after there is one."""


class Restage(BaseException):
    """Ends the staging of a program, to begin again. Not an ``Exception``: programs catch those.

    Args:
        early: what asked for it.
    """

    def __init__(self, early: Early):
        super().__init__()
        self.early = early


class Where(NamedTuple):
    """Where an operation is.

    Attributes:
        path: the module path.
        label: of the innermost loop or branch that it is in.
    """

    path: str
    label: str


class Early:
    """Asks handlers while a program is staged.

    Args:
        run: the run.

    Attributes:
        met: whether a handler should have been asked, but was not expected to.
        met_nested: whether that was inside of a nested trace, which JAX keeps and uses again: then
            it must be told apart by module path.
    """

    def __init__(self, run: Run):
        self._run = run
        self._base: Callable[[], Any] = _no_trace
        self._variables: dict[Any, int] = {}
        self._origins: Callable[[int], Origin] | None = None
        self._numbers = Numbers()
        self._looked_at = 0
        self._asked: list[tuple[int, Key, int]] = []
        self._notes: dict[int, tuple[Any, Notes]] = {}
        self._proxies: Mapping[int, ArrayProxy] = {}
        self.met = self.met_nested = False

    def begin(
        self,
        trace: Any,
        tracers: Sequence[Any],
        origins: Callable[[int], Origin],
        proxies: Mapping[int, ArrayProxy],
    ) -> None:
        """Says in which trace the program is staged, on what, and what that is kept as."""
        self._base = weakref.ref(trace)
        self._variables = {_compat.producer(tracer)[0]: i for i, tracer in enumerate(tracers)}
        self._origins = origins
        self._proxies = proxies

    def end(self) -> None:
        """Says that it is."""
        self._base, self._origins = _no_trace, None
        self._notes, self._proxies = {}, {}

    def call(self, handler: Callable[..., Any], call: Any, args: tuple, kwargs: dict) -> Any:
        """Asks the handler of a function. ``call`` is what PatchEngine tells of the call."""
        where = self._where(_compat.current_trace(), call.module_path)
        if where is None:
            return NotImplemented
        values = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "dtype")]
        told = self._told(
            call.op_name, "function", args, kwargs, where, call.within, values, call.proceed
        )
        with settled():
            result = self._noted(told, handler(told, *args, **kwargs))
        if result is not NotImplemented:
            return result
        with _compat.name_scope(WITHIN + call.op_name):
            return call.let_run(*args, **kwargs)

    def bind(
        self, path: str, trace: Any, primitive: Any, values: Any, params: dict[str, Any]
    ) -> Any:
        """Asks the handler of a primitive, and those of what it holds: there are some."""
        tapping = self._run.tapping
        marker = marker_in(primitive, params)
        if marker is not None and marker.owner == self._run.tapping.owner:
            return self._marker(path, trace, marker, params["jaxpr"], list(values))
        entry = tapping.primitives.get(primitive)
        enters = tapping.plans.enters(primitive, params, len(values))
        where = self._where(trace, path)
        if where is None:
            return NotImplemented
        values = list(values)
        with _compat.set_current_trace(trace):
            within: frozenset[str] = frozenset()
            if entry is not None:
                name, handler = entry
                proceed = functools.partial(self._proceed, primitive)
                told = self._told(
                    name, "primitive", tuple(values), params, where, within, values, proceed
                )
                with settled():
                    result = handler(told, *values, **params)
                    if result is not NotImplemented:
                        return self._noted(told, result)
                within = within | {name}
            if not enters:
                return NotImplemented
            with settled():
                around = Around(Frame(None, (), {}, *where), (), within, silent=False)
                return self._bind_entered(around, primitive, params, values)

    def _marker(self, path: str, trace: Any, marker: Marker, closed: Any, values: list[Any]) -> Any:
        """Asks the handler of a function whose call another engine has staged, and makes now."""
        where, entry = self._where(trace, path), self._run.tapping.functions.get(marker.site)
        if where is None or entry is None:
            return NotImplemented
        arrays, name = values[marker.extra :], marker.op_name
        args, kwargs = marker.packed.build(arrays)
        nothing: frozenset[str] = frozenset()
        told = self._told(name, "function", args, kwargs, where, nothing, arrays, marker.function)
        jaxpr = _compat.open_of(closed)
        with _compat.set_current_trace(trace), settled():
            result = self._noted(told, entry[1](told, *args, **kwargs))
            if result is not NotImplemented:
                avals = [atom.aval for atom in jaxpr.outvars]
                return check_result(told, result, marker.results, avals)
            known = self._operands(values)
            inner = Frame(
                jaxpr,
                known.origins,
                known.notes,
                *where,
                frozenset({name}),
                proxies=known.proxies,
            )
            with self._counting():
                return rerun(self._run, inner, jaxpr, [*_compat.consts_of(closed), *values])

    def reach(self, position: int, numbers: Numbers) -> None:
        """Counts the operations that were asked about before an equation of the program.

        Args:
            position: of the equation.
            numbers: of the operations of the program as it is run again.
        """
        while self._asked and self._asked[0][0] <= position:
            _, key, number = self._asked.pop(0)
            numbers[key] = max(numbers.get(key, 0), number + 1)

    def _where(self, trace: Any, path: str) -> Where | None:
        """Returns the module path and label, or None where they can't be known."""
        base = self._base()
        staging = _compat.staging_trace(trace)
        nested = staging is not base
        mode = self._run.tapping.mode
        if mode.early and (mode.by_path or not nested):
            # In the program's own trace, what another engine runs again has its name stack only.
            if not nested:
                return Where("/".join(self._scopes()), "")
            return Where(path, _compat.loop_label(staging, base))
        self.meet(nested)
        return None

    def meet(self, nested: bool) -> None:
        """Ends the staging of the program, which is to be staged otherwise.

        It ends at once: what JAX kept of it, other runs would find. What runs later, a rule that
        JAX kept, goes on.
        """
        self.met = True
        self.met_nested |= nested
        if self._base() is not None:
            raise Restage(self)

    def _scopes(self) -> list[str]:
        names = _compat.scopes_of(_compat.current_stack())
        return [name for name in names if not name.startswith(OURS)]

    def _told(
        self,
        name: str,
        level: str,
        args: tuple,
        params: Any,
        where: Where,
        within: frozenset[str],
        values: list[Any],
        proceed: Callable[..., Any],
    ) -> TraceCall:
        self._count_staged()
        path, label = where
        frame, key = Frame(None, (), {}, path, label), (path, label, name)
        number = self._numbers.next(*key)
        self._asked.append((self._looked_at, key, number))
        return TraceCall(
            name,
            level,
            args,
            params,
            (),
            number,
            frame,
            values,
            lambda i: self.origin(values[i]),
            lambda i: self._notes.get(id(values[i]), (None, _NOTHING))[1],
            lambda i: self._proxy(values[i]),
            lambda i: frame.expression(values[i]),
            within,
            proceed,
            self._run,
        )

    def _noted(self, told: TraceCall, result: Any) -> Any:
        for value, notes in told.given.values():
            self._notes[id(value)] = value, notes
        return result

    def _proceed(self, primitive: Any, *values: Any, **params: Any) -> Any:
        frame = Frame(None, (), {}, "", silent=True)
        around = Around(frame, (), frozenset(), silent=True)
        if self._run.tapping.plans.enters(primitive, params, len(values)):
            return self._bind_entered(around, primitive, params, list(values))
        return primitive.bind(*values, **primitive.get_bind_params(params))

    def _bind_entered(
        self, around: Around, primitive: Any, params: dict[str, Any], values: list[Any]
    ) -> Any:
        with self._counting():
            new = self._run.enter(around, primitive, params, values, self._operands(values))
        return primitive.bind(*new.values, **primitive.get_bind_params(new.params))

    def _operands(self, values: list[Any]) -> Operands:
        return Operands(
            [_compat.typeof(value) for value in values],
            [functools.partial(self.origin, value) for value in values],
            {i: self._notes[id(v)][1] for i, v in enumerate(values) if id(v) in self._notes},
            {i: held for i, v in enumerate(values) if (held := self._proxy(v)) is not None},
        )

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Lets what is run count here, and be counted when its place is reached."""
        self._count_staged()
        before, kept = self._numbers.copy(), self._run.numbers
        self._run.numbers = self._numbers
        try:
            yield
        finally:
            self._run.numbers = kept
            for key in self._numbers.since(before):
                self._asked.append((self._looked_at, key, self._numbers[key] - 1))

    def origin(self, value: Any) -> Origin | None:
        """Returns which input of the wrapped function a value of the staged program is."""
        inner = _compat.inner_value(value)
        if inner is not None:
            value, axis = inner
            origin = self.origin(value)
            if origin is None or axis is None:
                return origin
            rank = len(getattr(value, "shape", ()))
            return origin.moved(dropped(axis, rank))
        base = self._base()
        if base is None or not _compat.is_staged_in(value, base):
            return None
        var, eqn = _compat.producer(value)
        if isinstance(var, _compat.Literal):
            return None
        if eqn is None:
            index = self._variables.get(var)
            return None if index is None or self._origins is None else self._origins(index)
        step = move_of(
            eqn.primitive,
            eqn.params,
            [_compat.typeof(tracer) for tracer in eqn.in_tracers],
            [out.aval for out in eqn.outvars],
            eqn.outvars.index(var),
        )
        if step is None:
            return None
        origin = self.origin(eqn.in_tracers[step[0]])
        return None if origin is None else origin.moved(step[1])

    def _proxy(self, value: Any) -> ArrayProxy | None:
        """Returns what a value of the staged program, mapped over or not, is kept as."""
        base = self._base()
        if not self._proxies or base is None:
            return None
        # What vmap doesn't map is the value itself; a derivative needs the array.
        if _compat.is_batched(value):
            value, axis = _compat.inner_value(value) or (None, None)
            return self._proxy(value) if axis is None else None
        if not _compat.is_staged_in(value, base):
            return None
        var, eqn = _compat.producer(value)
        if eqn is None:
            return (
                None
                if isinstance(var, _compat.Literal)
                else self._proxies.get(self._variables.get(var, -1))
            )
        held = [self._proxy(tracer) for tracer in eqn.in_tracers]
        if not any(held):
            return None
        avals = [out.aval for out in eqn.outvars]
        how = (eqn.primitive.name, eqn.params, eqn.in_tracers, held)
        found = follow(*how, avals, lambda i: False)
        return found[eqn.outvars.index(var)]

    def _count_staged(self) -> None:
        """Counts what has been staged since the last time, and is to be asked later on."""
        base = self._base()
        if base is None:
            return
        eqns = _compat.staged_in(base)
        for eqn in eqns[self._looked_at :]:
            self._numbers.add(self._run.tapping.plans.counted(eqn))
        self._looked_at = len(eqns)
