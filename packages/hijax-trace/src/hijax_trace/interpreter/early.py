"""Early: what meets grad and its like while the program is still being staged.

What is differentiated inside the wrapped function can't be told from its derivative afterwards,
so a handler is asked at once, before the transformation's own rule. What it, and the rules, leave
behind in the staged program is marked by a name scope, and passed later on. What is only mapped
can wait (see ``mapped``), but for calls with objects among their arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from interception_core.engine_api import settled

from .. import compat
from ..staging.marker import Marker, check_result, marker_in
from .bodies import enter
from .call import Place, TraceCall
from .frames import Around, Frame, Metadata, Numbers, Operands
from .reinterpret import reinterpret
from .session import Session
from .tasks import OURS, WITHIN
from .tracers import KnownTracers, Tracers

_NOTHING: Metadata = {}


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
        session: the call of the wrapped function that this is for.

    Attributes:
        met: whether a handler should have been asked, but was not expected to.
        met_nested: whether that was inside of a nested trace, which JAX keeps and uses again: then
            it must be told apart by module path.
    """

    def __init__(self, session: Session):
        self._session = session
        self.tracers = Tracers()
        self._numbers = Numbers()
        self._looked_at = 0
        self.met = self.met_nested = False

    def call(self, handler: Callable[..., Any], call: Any, args: tuple, kwargs: dict) -> Any:
        """Ask the handler of a function. ``call`` is what PatchEngine tells of the call."""
        where = self._where(compat.current_trace(), call.module_path)
        if where is None:
            return NotImplemented
        values = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "dtype")]
        told = self._told(
            call.op_name, "function", args, kwargs, where, call.within, values, call.proceed
        )
        with settled():
            result = self._keep(told, handler(told, *args, **kwargs))
        if result is not NotImplemented:
            return result
        with compat.name_scope(WITHIN + call.op_name):
            return call.let_run(*args, **kwargs)

    def bind(
        self, path: str, trace: Any, primitive: Any, values: Any, params: dict[str, Any]
    ) -> Any:
        """Ask the handler of a primitive, and those of what it holds: there are some."""
        tapping = self._session.tapping
        marker = marker_in(primitive, params)
        if marker is not None and marker.owner == self._session.tapping.owner:
            return self._marker(path, trace, marker, params["jaxpr"], list(values))
        entry = tapping.primitives.get(primitive)
        enters = tapping.tasks.enters(primitive, params, len(values))
        where = self._where(trace, path)
        if where is None:
            return NotImplemented
        values = list(values)
        with compat.set_current_trace(trace):
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
                        return self._keep(told, result)
                within = within | {name}
            if not enters:
                return NotImplemented
            with settled():
                around = Around(self._frame(where, values), (), within, untapped=False)
                return self._bind_entered(around, primitive, params, values)

    def _marker(self, path: str, trace: Any, marker: Marker, closed: Any, values: list[Any]) -> Any:
        """Ask the handler of a function whose call another engine has staged, and makes now."""
        where, entry = self._where(trace, path), self._session.tapping.functions.get(marker.site)
        if where is None or entry is None:
            return NotImplemented
        arrays, name = values[marker.extra :], marker.op_name
        args, kwargs = marker.packed.build(arrays)
        nothing: frozenset[str] = frozenset()
        told = self._told(name, "function", args, kwargs, where, nothing, arrays, marker.function)
        jaxpr = compat.open_of(closed)
        with compat.set_current_trace(trace), settled():
            result = self._keep(told, entry[1](told, *args, **kwargs))
            if result is not NotImplemented:
                avals = [atom.aval for atom in jaxpr.outvars]
                return check_result(told, result, marker.results, avals)
            known = self._operands(values)
            inner = Frame(
                jaxpr,
                known.origins,
                known.metadata,
                *where,
                frozenset({name}),
                proxies=known.proxies,
                expressions=known.expressions,
                consts=compat.consts_of(closed),
                depth=self.tracers.depth(values),
            )
            with self._counting():
                return reinterpret(
                    self._session, inner, jaxpr, [*compat.consts_of(closed), *values]
                )

    def _where(self, trace: Any, path: str) -> Where | None:
        """Return the module path and label, or None where they can't be known."""
        base = self.tracers.base()
        staging = compat.staging_trace(trace)
        nested = staging is not base
        mode = self._session.tapping.mode
        if mode.early and (mode.by_path or not nested):
            # In the program's own trace, what another engine runs again has its name stack only.
            if not nested:
                return Where("/".join(self._scopes()), "")
            return Where(path, compat.loop_label(staging, base))
        self.meet(nested)
        return None

    def meet(self, nested: bool) -> None:
        """End the staging of the program, which is to be staged otherwise.

        It ends at once: what JAX kept of it, other runs would find. What runs later, a rule that
        JAX kept, goes on.
        """
        self.met = True
        self.met_nested |= nested
        if self.tracers.base() is not None:
            raise Restage(self)

    def _scopes(self) -> list[str]:
        names = compat.scopes_of(compat.current_stack())
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
        self._session.asked.append((self._looked_at, key, number))
        place, known = Place(frame, (), within, number), KnownTracers(values, self.tracers)
        return TraceCall(name, level, args, params, place, known, proceed, self._session)

    def _keep(self, told: TraceCall, result: Any) -> Any:
        """Keep what a handler attached to values, and which values are its own."""
        for value, metadata in told.given.values():
            self.tracers.attach(value, metadata)
        if result is not NotImplemented and not told.is_own(result):
            for value in jax.tree.leaves(result):
                self.tracers.replace(value)
        return result

    def _frame(self, where: Where, values: Sequence[Any]) -> Frame:
        """Return the frame that stands for what is around an operation."""
        return Frame(None, (), {}, *where, depth=self.tracers.depth(values))

    def _proceed(self, primitive: Any, *values: Any, **params: Any) -> Any:
        frame = self._frame(Where("", ""), values)
        around = Around(frame, (), frozenset(), untapped=True)
        if self._session.tapping.tasks.enters(primitive, params, len(values)):
            return self._bind_entered(around, primitive, params, list(values))
        return primitive.bind(*values, **primitive.get_bind_params(params))

    def _bind_entered(
        self, around: Around, primitive: Any, params: dict[str, Any], values: list[Any]
    ) -> Any:
        with self._counting():
            new = enter(
                reinterpret,
                self._session,
                around,
                primitive,
                params,
                values,
                self._operands(values),
            )
        result = primitive.bind(*new.values, **primitive.get_bind_params(new.params))
        if new.foreign:
            for value in jax.tree.leaves(result):
                self.tracers.replace(value)
        return result

    def _operands(self, values: list[Any]) -> Operands:
        known = self.tracers
        return Operands(
            [compat.typeof(value) for value in values],
            [functools.partial(known.origin, value) for value in values],
            {i: found for i, value in enumerate(values) if (found := known.metadata(value))},
            {i: found for i, value in enumerate(values) if (found := known.proxy(value))},
            [functools.partial(known.expression, value) for value in values],
        )

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Let what is run count here, and be counted when its place is reached."""
        self._count_staged()
        before, kept = self._numbers.copy(), self._session.numbers
        self._session.numbers = self._numbers
        try:
            yield
        finally:
            self._session.numbers = kept
            for key in self._numbers.since(before):
                self._session.asked.append((self._looked_at, key, self._numbers[key] - 1))

    def _count_staged(self) -> None:
        """Count what has been staged since the last time, and is to be asked later on."""
        base = self.tracers.base()
        if base is None:
            return
        eqns = compat.staged_in(base)
        for eqn in eqns[self._looked_at :]:
            self._numbers.add(self._session.tapping.tasks.counted(eqn))
        self._looked_at = len(eqns)
