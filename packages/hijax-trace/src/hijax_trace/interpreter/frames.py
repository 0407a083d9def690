"""Frames: what is known of the values of a program while it is run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from interception_core import Step, ValueKind

from ..dataflow.dataflow import Dataflow, Express
from ..dataflow.expression import Expression
from ..dataflow.flow import Origin, Resolve, flow_of
from ..dataflow.nodes import Unknown
from ..proxy.array_proxy import ArrayProxy

Metadata = Mapping[str, Any]
"""The metadata of one value."""


class Frame:
    """One jaxpr that is being run again, in one place.

    It keeps book of what its handlers have asked for, so that what they did can be used again
    wherever the answers are the same.

    Args:
        jaxpr: the jaxpr, open; None where there's none, but a single operation.
        inputs: the origins of its inputs.
        metadata: the metadata of its inputs, by number.
        path: the module path that it runs under.
        label: of the innermost loop or branch that it is in, for op ids.
        within: the names of the functions, tapped but let run, that it is a part of.
        untapped: whether no handler is asked.
        parent: the frame around it.
        proxies: what its inputs are kept as, by number.
        expressions: how those of its inputs are found; None where they are not known.
        consts: the values of the jaxpr's constants.
        depth: how many loops and maps there are around it.
        length: how many steps of a loop it is run for; see ``Body``.
        is_rule: whether it is a derivative's, and so run when the loops around it are over.

    Attributes:
        index: the number of its step, while it is staged as the body of a loop.
    """

    __slots__ = (
        "_consts",
        "_dataflow",
        "_expressions",
        "_flow",
        "_inputs",
        "_jaxpr",
        "_parent",
        "_path",
        "depth",
        "expressions_were_read",
        "foreign",
        "index",
        "is_parameter",
        "is_rule",
        "label",
        "length",
        "metadata",
        "numbers_were_read",
        "path_was_read",
        "proxies",
        "read",
        "replaced",
        "steps_were_read",
        "untapped",
        "within",
    )

    def __init__(
        self,
        jaxpr: Any,
        inputs: Sequence[Resolve | None],
        metadata: Mapping[int, Metadata],
        path: str,
        label: str = "",
        within: frozenset[str] = frozenset(),
        untapped: bool = False,
        parent: Frame | None = None,
        proxies: Mapping[int, ArrayProxy] | None = None,
        expressions: Sequence[Express] | None = None,
        consts: Sequence[Any] = (),
        depth: int = 0,
        length: int | None = 0,
        is_rule: bool = False,
    ):
        self._jaxpr = jaxpr
        self._expressions = expressions
        self._consts = consts
        self._dataflow: Dataflow | None = None
        self.depth = depth
        self.length = length
        self.is_rule = is_rule
        self.index: Any = None
        self._flow = None if jaxpr is None else flow_of(jaxpr)
        self._inputs = inputs
        self._parent = parent
        self._path = path
        self.label = label
        self.within = within
        self.untapped = untapped
        self.metadata: dict[Any, Metadata] = {jaxpr.invars[i]: note for i, note in metadata.items()}
        self.proxies: dict[Any, ArrayProxy] = {
            jaxpr.invars[i]: proxy for i, proxy in (proxies or {}).items()
        }
        self.replaced: set[Any] = set()
        # Of these, the values that the program's own operation did not compute.
        self.foreign: set[Any] = set()
        self.read: dict[int, Origin | None] = {}
        self.path_was_read = self.expressions_were_read = self.numbers_were_read = False
        self.steps_were_read = False
        # By which handlers have asked for the kinds of values.
        self.is_parameter: Callable[[str], bool] | None = None

    @property
    def is_program(self) -> bool:
        """Whether this is the frame of the wrapped function itself."""
        return self._parent is None and self._flow is not None

    def origin(self, atom: Any) -> Origin | None:
        """Return the origin of a variable or literal of the jaxpr."""
        source = None if self._flow is None else self._flow.source(atom)
        if source is None or not self.replaced.isdisjoint(source.through):
            return None
        origin = self.input(source.index)
        return None if origin is None else origin.moved(source.axes)

    def input(self, index: int) -> Origin | None:
        """Return the origin of an input."""
        if index not in self.read:
            resolve = self._inputs[index]
            self.read[index] = None if resolve is None else resolve()
        return self.read[index]

    def expression(self, atom: Any) -> Expression:
        """Return how a variable or literal of the jaxpr is computed, for a handler to see."""
        frame: Frame | None = self
        while frame is not None:
            frame.expressions_were_read = True
            frame = frame._parent
        return self.own_expression(atom)

    def kind(self, atom: Any, is_parameter: Callable[[str], bool]) -> ValueKind:
        """Return the kind of a variable or literal of the jaxpr, for a handler to see."""
        self.ask_kinds(is_parameter)
        flow = self._own_flow()
        if flow is not None and flow.is_activation(atom, is_parameter):
            return ValueKind("activation")
        return self.own_expression(atom).judged(is_parameter)

    def ask_kinds(self, is_parameter: Callable[[str], bool]) -> None:
        """Note that what is done in this program depends on the kinds of its inputs."""
        frame: Frame | None = self
        while frame is not None:
            frame.is_parameter = is_parameter
            frame = frame._parent

    def own_expression(self, atom: Any) -> Expression:
        """Return how a variable or literal of the jaxpr is computed, for our own use."""
        flow = self._own_flow()
        if flow is None:
            return Unknown(getattr(atom, "aval", None), "a value of a derivative", None)
        return flow.expression(atom)

    def _own_flow(self) -> Dataflow | None:
        if self._dataflow is None and self._jaxpr is not None and self._expressions is not None:
            where = (self._jaxpr, self._expressions, self._consts, self.foreign)
            self._dataflow = Dataflow(*where)
        return self._dataflow

    def read_numbers(self) -> None:
        """Say that a handler has looked at the number of an operation."""
        frame: Frame | None = self
        while frame is not None:
            frame.numbers_were_read = True
            frame = frame._parent

    def steps(self) -> tuple[Step, ...] | None:
        """Return the loops around, for a handler to see; None if they are not known."""
        found, frame, are_over, is_known = [], self, False, True
        while frame is not None:
            frame.steps_were_read = True
            if frame.length != 0:
                found.append(Step(None if are_over else frame.index, frame.length))
            are_over |= frame.is_rule
            # What is asked early, in a program that JAX still stages, knows the label alone.
            is_known = frame._parent is not None or not frame.label
            frame = frame._parent
        return tuple(reversed(found)) if is_known else None

    def lengths(self) -> tuple[int | None, ...] | None:
        """Return how many steps the loops around have, for a handler to see."""
        steps = self.steps()
        return None if steps is None else tuple(step.length for step in steps)

    def path(self, scopes: Sequence[str]) -> str:
        """Return the module path within ``scopes``, for a handler to see."""
        frame: Frame | None = self
        while frame is not None:
            frame.path_was_read = True
            frame = frame._parent
        return self.own_path(scopes)

    def own_path(self, scopes: Sequence[str]) -> str:
        """Return the module path within ``scopes``, for our own use."""
        return "/".join(filter(None, (self._path, *scopes)))


class Around(NamedTuple):
    """Where an equation is.

    Attributes:
        frame: its frame.
        scopes: the names of the scopes around it in that.
        within: the names of the functions that it is a part of.
        untapped: whether no handler is asked.
    """

    frame: Frame
    scopes: Sequence[str]
    within: frozenset[str]
    untapped: bool


class Operands(NamedTuple):
    """What is known of the operands of an equation.

    Attributes:
        avals: their types.
        origins: how the origin of each is found.
        metadata: their metadata, by number.
        proxies: what they are kept as, by number.
        expressions: how that of each is found; None where they are not known.
    """

    avals: Sequence[Any]
    origins: Sequence[Resolve]
    metadata: Mapping[int, Metadata]
    proxies: Mapping[int, ArrayProxy]
    expressions: Sequence[Express] | None = None


Key = tuple[str, str, str]
"""Module path, label and operation name."""


class Numbers(dict[Key, int]):
    """How many operations there have been, by what they have in common."""

    def next(self, path: str, label: str, name: str) -> int:
        """Count one operation. Return how many there were before it."""
        key = (path, label, name)
        number = self.get(key, 0)
        self[key] = number + 1
        return number

    def since(self, before: Numbers) -> dict[Key, int]:
        """Return what has been counted since there was ``before``."""
        return {key: n - before.get(key, 0) for key, n in self.items() if n != before.get(key, 0)}

    def add(self, counted: Mapping[Key, int]) -> None:
        """Count what was counted elsewhere."""
        for key, number in counted.items():
            self[key] = self.get(key, 0) + number

    def copy(self) -> Numbers:
        """Return numbers that go on from here by themselves."""
        return Numbers(self)
