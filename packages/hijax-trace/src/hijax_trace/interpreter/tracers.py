"""Tracers: what is known of values that are being staged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from interception_core import ValueKind

from .. import compat
from ..dataflow.dataflow import Dataflow, constant
from ..dataflow.expression import Expression
from ..dataflow.flow import Origin, dropped
from ..dataflow.nodes import OTHER_TRACE, Part, Unknown
from ..proxy.array_proxy import ArrayProxy, Lost
from ..proxy.carrier import proxy_of
from .frames import Frame, Inputs
from .questions import Metadata
from .views import DIFFERENTIATED, moved_proxy

_NOTHING: Metadata = {}


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
