"""Early: handlers that are asked while the program is still being staged.

JAX replaces an operation that the program differentiates by the operations of its derivative, so
its handler is asked before that, while the program is staged. A name scope marks the operations
that the handler and JAX's rules leave in the staged program as settled: they are passed later.
Operations that are only mapped can wait (see ``staging.deferred``), except for calls with objects
among their arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from interception_core.engine_api import settled

from .. import compat
from ..dataflow.holders import custom_body
from ..staging.marker import Marker, check_result, marker_in
from .call import TraceCall
from .custom import rebuild_custom
from .entering import rebuild
from .frames import Frame, Inputs, Operands, Place
from .op_ids import OURS, WITHIN, Numbers, join_path
from .session import Around, Session
from .tracers import Tracers

_NO_FUNCTIONS: frozenset[str] = frozenset()


class Restage(BaseException):
    """Ends the staging of a program, so that it is staged again.

    It is not an ``Exception``, because programs catch those.
    """

    def __init__(self, early: Early):
        super().__init__()
        self.early = early


class Early:
    """Asks handlers while a program is staged.

    Attributes:
        tracers: what is known of the program's values.
        needs_restage: whether a handler had to be asked in a nested trace, which JAX reuses: see
            ``BY_PATH``.
    """

    def __init__(self, session: Session):
        self._session = session
        self.tracers = Tracers()
        self._numbers = Numbers()
        self._looked_at = 0
        self.needs_restage = False

    def call(
        self,
        handler: Callable[..., Any],
        call: Any,
        args: tuple,
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> Any:
        """Ask the handler of a function, whose arguments have these leaves.

        Returns:
            The result, or NotImplemented where the handler is asked later.
        """
        where = self._where(compat.current_trace(), call.module_path)
        if where is None:
            return NotImplemented
        values = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
        name, what = call.op_name, (call.within, values, call.proceed)
        _, result = self._ask(handler, name, "function", args, kwargs, where, *what)
        if result is not NotImplemented:
            return result
        with compat.name_scope(WITHIN + name):
            return call.let_run(*args, **kwargs)

    def bind(
        self, path: str, trace: Any, primitive: Any, values: list[Any], params: dict[str, Any]
    ) -> Any:
        """Ask the handlers of a primitive and of its programs.

        Returns:
            The results, or NotImplemented where no handler replaced anything.
        """
        tapping = self._session.tapping
        marker = marker_in(primitive, params)
        if marker is not None and marker.owner == self._session.tapping.owner:
            return self._marker(path, trace, marker, params["jaxpr"], values)
        entry = tapping.primitives.get(primitive)
        enters = tapping.tasks.enters(primitive, params, len(values))
        where = self._where(trace, path)
        if where is None:
            return NotImplemented
        with compat.set_current_trace(trace):
            within = _NO_FUNCTIONS
            if entry is not None:
                name, handler = entry
                proceed = functools.partial(self._proceed, primitive)
                what = tuple(values), params, where, within, values, proceed
                _, result = self._ask(handler, name, "primitive", *what)
                if result is not NotImplemented:
                    return result
                within = within | {name}
            if not enters:
                return NotImplemented
            with settled():
                frame = self._frame(where, values)
                frame.is_derived = compat.transforms_above_staging(trace).derives
                return self._bind_rebuilt(Place(frame, (), within), primitive, params, values)

    def _marker(self, path: str, trace: Any, marker: Marker, closed: Any, values: list[Any]) -> Any:
        """Ask the handler of a marker that another engine makes."""
        where, entry = self._where(trace, path), self._session.tapping.functions.get(marker.site)
        if where is None or entry is None:
            return NotImplemented
        arrays, name, jaxpr = values[marker.extra :], marker.op_name, compat.open_of(closed)
        args, kwargs = marker.packed.build(arrays)
        what = args, kwargs, where, _NO_FUNCTIONS, arrays, marker.function
        with compat.set_current_trace(trace), settled():
            call, result = self._ask(entry[1], name, "function", *what)
            if result is not NotImplemented:
                avals = [atom.aval for atom in jaxpr.outvars]
                return check_result(call, result, marker.results, avals)
            inner = Frame(
                jaxpr,
                self._operands(values),
                *where,
                frozenset({name}),
                consts=compat.consts_of(closed),
                depth=self.tracers.depth(values),
            )
            with self._counting():
                return self._session.reinterpret(inner, jaxpr, [*compat.consts_of(closed), *values])

    def _where(self, trace: Any, path: str) -> tuple[str, str] | None:
        """Return module path and loop label; None where the program must be staged again."""
        base, staging = self.tracers.base(), compat.staging_trace(trace)
        if staging is base:
            # Another engine re-interprets in the program's own trace; its frames' paths are
            # unknown here, but the name stack has their scopes.
            return join_path(*self._scopes()), ""
        if self._session.tapping.by_path:
            return path, compat.loop_label(staging, base)
        self.restage()
        return None

    def restage(self) -> None:
        """Stage the program again, because a handler must be asked in a nested trace.

        The staging ends at once: other calls would reuse traces that JAX kept of it. A rule that
        runs after the staging continues.
        """
        self.needs_restage = True
        if self.tracers.base() is not None:
            raise Restage(self)

    def _scopes(self) -> list[str]:
        names = compat.scopes_of(compat.current_stack())
        return [name for name in names if not name.startswith(OURS)]

    def _ask(
        self,
        handler: Callable[..., Any],
        name: str,
        level: str,
        args: tuple,
        params: Any,
        where: tuple[str, str],
        within: frozenset[str],
        values: list[Any],
        proceed: Callable[..., Any],
    ) -> tuple[TraceCall, Any]:
        """Ask a handler. Return what it is given, and its answer.

        The metadata that it attaches is kept, and which values it replaces.
        """
        self._count_staged()
        path, label = where
        frame, key = Frame(None, Inputs(), path, label), (path, label, name)
        number = self._numbers.next(*key)
        self._session.asked.append((self._looked_at, key, number))
        place, known = Place(frame, (), within), (self.tracers, values, values)
        call = TraceCall(
            name, level, args, params, place, (label, number), *known, proceed, self._session
        )
        with settled():
            answer = handler(call, *args, **params)
        for value, metadata in call.given.values():
            self.tracers.attach(value, metadata)
        for value in () if answer is NotImplemented else jax.tree.leaves(answer):
            self.tracers.replace(value, call.is_own(answer))
        return call, answer

    def _frame(self, where: tuple[str, str], values: Sequence[Any]) -> Frame:
        """Return a frame for an operation that has no jaxpr yet."""
        return Frame(None, Inputs(), *where, depth=self.tracers.depth(values))

    def _proceed(self, primitive: Any, *values: Any, **params: Any) -> Any:
        """Run a primitive for its handler: nothing in it is tapped."""
        if self._session.tapping.tasks.enters(primitive, params, len(values)):
            place = Place(self._frame(("", ""), values), (), _NO_FUNCTIONS, untapped=True)
            return self._bind_rebuilt(place, primitive, params, list(values))
        return primitive.bind(*values, **primitive.get_bind_params(params))

    def _bind_rebuilt(
        self, place: Place, primitive: Any, params: dict[str, Any], values: list[Any]
    ) -> Any:
        with self._counting():
            around = Around(self._session, place, self._operands(values))
            if custom_body(primitive, params, len(values)) is not None:
                new = rebuild_custom(around, params, values)
            else:
                new = rebuild(around, primitive, params, values)
        result = primitive.bind(*new.values, **primitive.get_bind_params(new.params))
        results = result if primitive.multiple_results else [result]
        for value in results if new.outcome.replaced else ():
            self.tracers.replace(value, not new.outcome.from_handler)
        for i, note in new.outcome.metadata.items():
            self.tracers.attach(results[i], note)
        return result

    def _operands(self, values: list[Any]) -> Operands:
        return Operands(self.tracers, values, list(map(compat.typeof, values)))

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count operations here, and later in the session."""
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
        """Count the operations that were staged since the last call."""
        base = self.tracers.base()
        if base is None:
            return
        new = compat.staged_in(base, self._looked_at)
        for eqn in new:
            self._numbers.add(self._session.tapping.tasks.counted(eqn))
        self._looked_at += len(new)
