"""TraceCall: what a handler of TraceEngine is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from interception_core import Made, OpCall, Operand, Step, ValueKind

from .. import compat
from ..dataflow.expression import Expression, numbers_in
from ..dataflow.flow import Origin
from ..proxy.array_proxy import ArrayProxy, Lost
from ..proxy.carrier import proxy_of
from .frames import Known, Place
from .joins import made_by
from .questions import (
    EXPRESSION,
    IS_ACTIVATION,
    KIND,
    KINDS,
    NUMBERS,
    ORIGIN,
    PATH,
    STEPS,
    Metadata,
    Question,
)
from .session import Session
from .views import moved_proxy

_NOTHING: Metadata = {}
_OF_PLACE = {(EXPRESSION,), (NUMBERS,), (STEPS,)}
"""Questions whose answers are another thing at each operation."""


@dataclass(slots=True, eq=False, repr=False)
class TraceCall(OpCall):
    """One tapped operation of a staged program.

    Args:
        counted: its label, and its number among operations of the same path, label and name.
        known: what is known of the program's values.
        values: the arrays among its arguments.
        atoms: what ``known`` knows them as.

    Attributes:
        asked: what the handler asked; see ``questions``.
        given: metadata that the handler attached, with the value, by the value's ``id``.
    """

    op_name: str
    level: str
    _args: tuple
    params: Mapping[str, Any]
    _place: Place
    _counted: tuple[str, int]
    _known: Known
    _values: Sequence[Any]
    _atoms: Sequence[Any]
    _proceed: Callable[..., Any]
    _session: Session
    _own: Any = field(default=None, init=False)
    asked: set[Question] = field(default_factory=set, init=False)
    # The value is kept with its metadata, so that its id isn't given to another one.
    given: dict[int, tuple[Any, Metadata]] = field(default_factory=dict, init=False)

    @property
    def module_path(self) -> str:  # pyrefly: ignore[bad-override]
        self._log(PATH)
        return self._place.frame.path(self._place.scopes)

    @property
    def label(self) -> str:
        self._log(NUMBERS)
        return self._counted[0]

    @property
    def number(self) -> int:
        self._log(NUMBERS)
        return self._counted[1]

    @property
    def within(self) -> frozenset[str]:
        return self._place.within

    def proceed(self, *args: Any, **kwargs: Any) -> Any:
        result = self._proceed(*args, **kwargs)
        # With its own arguments, the result is what the program would have computed.
        if len(args) == len(self._args) and kwargs.keys() == self.params.keys():
            pairs = [*zip(args, self._args, strict=True)]
            pairs += [(kwargs[name], value) for name, value in self.params.items()]
            if all(given is own for given, own in pairs):
                self._own = result
        return result

    def is_own(self, result: Any) -> bool:
        """Return whether a handler's result is the operation's own, from ``proceed``."""
        return self._own is not None and result is self._own

    def provenance(self, value: Any) -> str | None:
        origin = self._origin(value)
        return None if origin is None else origin.path

    def proxy(self, value: Any) -> ArrayProxy | None:
        held = self._held(value)
        return None if isinstance(held, Lost) else held

    def why_no_proxy(self, value: Any) -> str | None:
        held = self._held(value)
        return held.why if isinstance(held, Lost) else None

    def _held(self, value: Any) -> ArrayProxy | None:
        index = self._index(value)
        if index is not None:
            return proxy_of(self._known.proxy(self._atoms[index]))
        # A handler may have moved an operand, for example transposed a weight.
        own = [proxy_of(self._known.proxy(atom)) for atom in self._atoms]
        pairs = [(x, one) for x, one in zip(self._values, own, strict=True) if one is not None]
        held = {id(compat.producer(x)[0]): one for x, one in pairs if compat.is_staged(x)}
        if not held:
            return None
        return moved_proxy(value, lambda before: held.get(id(compat.producer(before)[0])))

    def expression(self, value: Any) -> Expression | None:
        index = self._index(value)
        if index is None:
            return None
        self._log(EXPRESSION)
        return self._known.expression(self._atoms[index])

    def kind(self, value: Any, is_parameter: Callable[[str], bool]) -> ValueKind | None:
        index = self._index(value)
        if index is None:
            return None
        self._place.frame.note(KINDS, is_parameter)
        self.asked.add((KIND, index, is_parameter))
        return self._known.kind(self._atoms[index], is_parameter)

    def is_activation(self, value: Any, is_parameter: Callable[[str], bool]) -> bool:
        index = self._index(value)
        if index is None:
            return False
        self._place.frame.note(KINDS, is_parameter)
        self.asked.add((IS_ACTIVATION, index, is_parameter))
        return self._known.is_activation(self._atoms[index], is_parameter)

    def is_linear(self, value: Any) -> bool:
        index = self._index(value)
        return index is not None and self._known.is_linear(self._atoms[index])

    def made_by(self, value: Any) -> Made | None:
        index = self._index(value)
        if index is None or not self._known.is_used_once(self._atoms[index]):
            return None
        self._log(EXPRESSION)  # it is another one at each operation
        return made_by(value)

    def roots(self, value: Any) -> frozenset[str] | None:
        expression = self.expression(value)
        if expression is None or expression.inputs is None:
            return None
        found = map(self._session.origin, numbers_in(expression.inputs))
        return frozenset(origin.path for origin in found if origin is not None)

    @property
    def steps(self) -> tuple[Step, ...] | None:
        self._log(STEPS)
        return self._place.frame.steps()

    def operand(self, value: Any) -> Operand:
        origin = self._origin(value)
        path, axes = (None, None) if origin is None else origin
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            return Operand(None, None, path, None, self.metadata(value))
        return Operand(tuple(shape), dtype, path, axes, self.metadata(value))

    def _attach(self, value: Any, metadata: Metadata) -> None:
        self.given[id(value)] = value, metadata

    def metadata(self, value: Any) -> Metadata:
        given = self.given.get(id(value))
        if given is not None:
            return given[1]
        index = self._index(value)
        return _NOTHING if index is None else self._known.metadata_of(self._atoms[index])

    @property
    def depends_on_place(self) -> bool:
        """Whether what the handler did may differ where it is told the same."""
        return self._own is not None or bool(self.given) or not self.asked.isdisjoint(_OF_PLACE)

    def metadata_of(self, result: Any) -> Metadata | None:
        """Return what the handler attached to a result."""
        given = self.given.get(id(result))
        return None if given is None else given[1]

    def _origin(self, value: Any) -> Origin | None:
        if self._session.finished:
            raise RuntimeError(
                "OpCall.operands must be read while the wrapped function runs, got a call that "
                "has ended. Read it in the handler and keep the result."
            )
        index = self._index(value)
        if index is None:
            return None
        self.asked.add((ORIGIN, index))
        return self._known.origin(self._atoms[index])

    def _log(self, what: str) -> None:
        """Log a question that is not about an operand, here and in the frames around."""
        self.asked.add((what,))
        self._place.frame.note(what)

    def _index(self, value: Any) -> int | None:
        for index, known in enumerate(self._values):
            if known is value:
                return index
        return None
