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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from interception_core import ValueKind
from interception_core.engine_api import settled

from .. import compat
from ..dataflow.dataflow import Dataflow, constant
from ..dataflow.expression import Expression
from ..dataflow.flow import Origin, dropped
from ..dataflow.holders import custom_body
from ..dataflow.nodes import OTHER_TRACE, Part, Unknown
from ..proxy.array_proxy import ArrayProxy, Lost
from ..proxy.carrier import proxy_of
from ..staging.marker import Marker, check_result, marker_in
from .call import TraceCall
from .custom import rebuild_custom
from .entering import rebuild
from .frames import Frame, Inputs, Place, operands_of
from .op_ids import OURS, WITHIN, Numbers, join_path
from .questions import Metadata
from .session import Around, Session
from .views import DIFFERENTIATED, moved_proxy

_NOTHING: Metadata = {}
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

    def _operands(self, values: list[Any]) -> Inputs:
        return operands_of(self.tracers, values, list(map(compat.typeof, values)))

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


class Tracers:
    """The values of one program while it is staged.

    Attributes:
        base: returns the program's trace, or None before and after the staging.
    """

    def __init__(self) -> None:
        self.base: Callable[[], Any] = lambda: None  # as a dead weak reference
        self._frame: Frame | None = None
        self._staged: _Staged | None = None
        self._metadata: dict[int, tuple[Any, Metadata]] = {}
        self._held: Callable[[], Mapping[int, ArrayProxy]] = dict
        self._proxies: Mapping[int, ArrayProxy] | None = None

    def begin(
        self,
        trace: Any,
        tracers: Sequence[Any],
        inputs: Inputs,
        proxies: Callable[[], Mapping[int, ArrayProxy]],
    ) -> None:
        """Begin the staging of the program.

        Args:
            proxies: returns the array proxies of inputs, by number. Few programs ask for them.
        """
        self.base, self._held = weakref.ref(trace), proxies
        variables = [compat.producer(tracer)[0] for tracer in tracers]
        self._staged = _Staged(trace, variables)
        self._frame = Frame(self._staged, inputs, "")

    def end(self) -> None:
        """End the staging of the program."""
        self.base, self._frame, self._staged = lambda: None, None, None
        self._metadata, self._held, self._proxies = {}, dict, None

    def attach(self, value: Any, metadata: Metadata) -> None:
        """Keep the metadata that a handler attached to a value."""
        self._metadata[id(value)] = value, metadata

    def replace(self, value: Any, is_own: bool = False) -> None:
        """Mark a value as a handler's result; ``is_own`` if the operation itself computed it."""
        *_, (value, _) = _layers(value)
        if self._frame is not None and self._is_here(value):
            var, _ = compat.producer(value)
            self._frame.replace([var], is_own)
            if not is_own:
                self._frame.values.forget(var)  # a handler may return an operand

    def metadata_of(self, value: Any) -> Metadata:
        return self._metadata.get(id(value), (None, _NOTHING))[1]

    def origin(self, value: Any) -> Origin | None:
        """Return the origin of a value, or None; of a mapped one, in one example."""
        *outer, (inner, _) = _layers(value)
        origin = self._known().origin(compat.producer(inner)[0]) if self._is_here(inner) else None
        for one, axis in reversed(outer):
            if axis is not None and origin is not None:
                origin = origin.moved(dropped(axis, one.ndim + 1))
        return origin

    def expression(self, value: Any) -> Expression:
        """Return the expression of a value, in one example of maps."""
        *outer, (inner, _) = _layers(value)
        found = self._unmapped(inner)
        # Derivatives are not counted, as where handlers are asked later: keys are the same.
        axes = [axis for one, axis in reversed(outer) if compat.is_batched(one)]
        for depth, axis in enumerate(axes):
            if axis is not None:
                found = Part(compat.step_type(found.aval, axis), found, axis, depth, True)
        return found

    def kind(self, value: Any, is_parameter: Callable[[str], bool]) -> ValueKind:
        return self.expression(value).judged(is_parameter)

    def is_activation(self, value: Any, is_parameter: Callable[[str], bool]) -> bool:
        return False

    def is_linear(self, value: Any) -> bool:
        tracers = (one for one, _ in _layers(value) if isinstance(one, compat.Tracer))
        return any(compat.is_transposing(compat.trace_of(one)) for one in tracers)

    def is_used_once(self, value: Any) -> bool:
        """Return False: what the program does after this is not known."""
        return False

    def depth(self, values: Sequence[Any]) -> int:
        """Return how many maps are around values."""
        layers = ([one for one, _ in _layers(value)] for value in values)
        return max((sum(map(compat.is_batched, one)) for one in layers), default=0)

    def _unmapped(self, value: Any) -> Expression:
        if not isinstance(value, compat.Tracer):
            return constant(value)
        if not self._is_here(value):
            return Unknown(compat.typeof(value), OTHER_TRACE, None)
        return self._known().expression(compat.producer(value)[0])

    def _known(self) -> Frame:
        """Return what is known of the program's values, with those that were staged last."""
        assert self._frame is not None
        assert self._staged is not None
        self._staged.grow(self._frame.values)
        return self._frame

    def proxy(self, value: Any) -> ArrayProxy | None:
        """Return the array proxy of a value, mapped or not, or None."""
        if self._proxies is None:
            self._proxies = self._held()
        if not self._proxies:
            return None
        # A value that vmap does not map has its proxy inside, too. A derivative needs the array.
        while compat.is_batched(value):
            whole, axis = compat.inner_value(value) or (None, None)
            if axis is not None:
                held = proxy_of(self.proxy(whole))
                why = f"vmap maps it {DIFFERENTIATED}"
                return None if held is None else Lost(value.shape, value.dtype, why)
            value = whole
        if not self._is_here(value):
            *_, (primal, _) = _layers(value)
            if primal is value or proxy_of(self.proxy(primal)) is None:
                return None
            aval = compat.typeof(value)
            why = "the program differentiates by it, which takes its array"
            return Lost(aval.shape, aval.dtype, why)
        return moved_proxy(value, self._given_proxy, self.expression)

    def _given_proxy(self, value: Any) -> ArrayProxy | None:
        """Return the array proxy of an input."""
        var, eqn = compat.producer(value)
        is_input = eqn is None and not isinstance(var, compat.Literal)
        if not is_input or self._proxies is None:
            return None
        return self._proxies.get(self._known().values.flow.inputs.get(var, -1))

    def _is_here(self, value: Any) -> bool:
        base = self.base()
        return base is not None and compat.is_staged_in(value, base)


def _layers(value: Any) -> Iterator[tuple[Any, int | None]]:
    """Yield a value and the axis that it is mapped along, then the same of the values inside."""
    while (inner := compat.inner_value(value)) is not None:
        yield value, inner[1]
        value = inner[0]
    yield value, None


class _StagedEqn(NamedTuple):
    """An equation that is being staged, with the attributes of a jaxpr's."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Any]
    outvars: list[Any]
    effects: Any


class _Staged:
    """The equations of a program that is being staged, as those of a jaxpr.

    A question about a value takes in what was staged since the last one, so that what is known of
    the values before stays known: a step of training has thousands of equations, and handlers ask
    about most of them.

    Attributes:
        eqns: the equations so far, in order.
    """

    def __init__(self, trace: Any, invars: Iterable[Any]):
        self.eqns: list[_StagedEqn] = []
        self.invars = list(invars)
        self._trace = weakref.ref(trace)
        self._count = 0

    def grow(self, values: Dataflow) -> None:
        """Take in the equations and constants that are new, for the values of this program."""
        trace = self._trace()
        if trace is None:
            return
        first, self._count = self._count, compat.staged_count(trace)
        for eqn in compat.staged_in(trace, first):
            values.flow.makers.update(dict.fromkeys(eqn.outvars, len(self.eqns)))
            atoms = [compat.producer(tracer)[0] for tracer in eqn.in_tracers]
            parts = eqn.primitive, eqn.params, atoms, eqn.outvars, eqn.effects
            self.eqns.append(_StagedEqn(*parts))
        values.consts.update(compat.constants_of(trace))
