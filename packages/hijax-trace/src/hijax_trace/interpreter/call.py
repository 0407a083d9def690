"""What a handler of the trace engine is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interception_core import OpCall, Operand

from ..dataflow.expression import Expression
from ..proxy.array_proxy import ArrayProxy, Lost
from .frames import Frame, Notes, Origin

if TYPE_CHECKING:
    from .run import Run

_NOTHING: Notes = {}


class TraceCall(OpCall):
    """One tapped operation of a staged program.

    Args:
        op_name: its name.
        level: "function" or "primitive".
        args: the positional arguments that its handler gets.
        params: the keyword arguments.
        scopes: the names of the scopes around it in its frame.
        number: its number among such operations.
        frame: where it is.
        values: the arrays among its arguments.
        origins: of each of them, how its origin is found.
        notes: of each of them, the metadata.
        proxies: of each of them, what it is kept as.
        expressions: of each of them, how it is computed.
        within: the names of the functions that it is a part of.
        proceed: runs the original.
        run: the run that it is a part of.
    """

    __slots__ = (
        "_expressions",
        "_frame",
        "_notes",
        "_number",
        "_origins",
        "_own",
        "_proceed",
        "_proxies",
        "_run",
        "_scopes",
        "_values",
        "_within",
        "given",
    )

    def __init__(
        self,
        op_name: str,
        level: str,
        args: tuple,
        params: Mapping[str, Any],
        scopes: Sequence[str],
        number: int,
        frame: Frame,
        values: Sequence[Any],
        origins: Callable[[int], Origin | None],
        notes: Callable[[int], Notes],
        proxies: Callable[[int], ArrayProxy | None],
        expressions: Callable[[int], Expression],
        within: frozenset[str],
        proceed: Callable[..., Any],
        run: Run,
    ):
        self.op_name = op_name
        self.level = level
        self.params = params
        self._args = args
        self._scopes = scopes
        self._number = number
        self._frame = frame
        self._values = values
        self._origins = origins
        self._notes = notes
        self._proxies = proxies
        self._expressions = expressions
        self._within = within
        self._proceed = proceed
        self._run = run
        self._own: Any = None
        # By identity; the value is held, so that its id isn't given to another one.
        self.given: dict[int, tuple[Any, Notes]] = {}

    @property
    def module_path(self) -> str:  # pyrefly: ignore[bad-override]
        return self._frame.path(self._scopes)

    @property
    def op_id(self) -> str:
        self._frame.read_numbers()
        parts = filter(None, (self.module_path, self._frame.label, self.op_name))
        return f"{'/'.join(parts)}:{self._number}"

    @property
    def within(self) -> frozenset[str]:
        return self._within

    def proceed(self, *args: Any, **kwargs: Any) -> Any:
        result = self._proceed(*args, **kwargs)
        if len(args) == len(self._args) and kwargs.keys() == self.params.keys():
            pairs = [*zip(args, self._args, strict=True)]
            pairs += [(kwargs[name], value) for name, value in self.params.items()]
            if all(given is own for given, own in pairs):
                self._own = result
        return result

    def is_own(self, result: Any) -> bool:
        """Returns whether a handler's result is the operation's own, from ``proceed``."""
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
        return None if index is None else self._proxies(index)

    def expression(self, value: Any) -> Expression | None:
        index = self._index(value)
        return None if index is None else self._expressions(index)

    def roots(self, value: Any) -> frozenset[str] | None:
        expression = self.expression(value)
        if expression is None or expression.inputs is None:
            return None
        numbers = (i for i in range(expression.inputs.bit_length()) if expression.inputs >> i & 1)
        return frozenset(self._run.origin(i).path for i in numbers)

    def operand(self, value: Any) -> Operand:
        origin = self._origin(value)
        path, axes = (None, None) if origin is None else origin
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            return Operand(None, None, path, None, self.metadata(value))
        return Operand(tuple(shape), dtype, path, axes, self.metadata(value))

    def _attach(self, value: Any, metadata: Notes) -> None:
        self.given[id(value)] = value, metadata

    def metadata(self, value: Any) -> Notes:
        given = self.given.get(id(value))
        if given is not None:
            return given[1]
        index = self._index(value)
        return _NOTHING if index is None else self._notes(index)

    def notes_of(self, result: Any) -> Notes | None:
        """Returns what the handler attached to a result."""
        given = self.given.get(id(result))
        return None if given is None else given[1]

    def _origin(self, value: Any) -> Origin | None:
        if self._run.finished:
            raise RuntimeError(
                "OpCall.operands is known only while the wrapped function runs. Read it in the "
                "handler and keep the result."
            )
        index = self._index(value)
        return None if index is None else self._origins(index)

    def _index(self, value: Any) -> int | None:
        for index, known in enumerate(self._values):
            if known is value:
                return index
        return None
