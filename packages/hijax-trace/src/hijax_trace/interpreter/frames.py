"""Frames: what is known of the values of one jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from interception_core import Step, ValueKind

from .. import compat
from ..dataflow.dataflow import Dataflow, Express
from ..dataflow.expression import Expression
from ..dataflow.flow import Origin, Resolve, flow_of
from ..dataflow.nodes import Unknown
from ..proxy.array_proxy import ArrayProxy
from .hi_prims import Applied
from .numbers import join_path
from .questions import EXPRESSION, KINDS, PATH, STEPS, Question

Metadata = Mapping[str, Any]
"""What handlers attached to one value."""


class Frame:
    """One jaxpr that is re-interpreted, in one place of the program.

    It logs what handlers ask. What they did can be reused wherever the answers are the same: see
    ``questions``.

    Args:
        jaxpr: the open jaxpr; None where there is only a single operation.
        inputs: finds the origin of each input.
        metadata: the metadata of its inputs, by number.
        path: the module path around it.
        label: the label, in op ids, of the innermost loop or branch around it.
        within: names of the tapped functions around it whose handlers let them run.
        untapped: whether no handler is asked.
        parent: the frame around it.
        proxies: the array proxies of its inputs, by number.
        expressions: finds the expression of each input; None where they are not known.
        consts: the values of the jaxpr's constants.
        depth: how many loops and maps are around it.
        length: how many steps of a loop it is run for; see ``Body``.
        is_rule: whether it is a derivative rule.
        is_later: whether it is staged when the loops around have ended.
        linear: the inputs in which JAX needs it to be linear; see ``OpCall.is_linear``.

    Attributes:
        index: the step's number, while the frame is staged as the body of a loop.
        replaced: variables whose values come from a handler's result.
        from_handler: those of them that the program's own operation did not compute.
        read: the origins of inputs that handlers asked for.
        asked: the other questions that they asked; see ``questions``.
        applied: in a HiPrim's rule, what handlers were asked about the HiPrim before, or None.
    """

    __slots__ = (
        "_consts",
        "_dataflow",
        "_expressions",
        "_flow",
        "_inputs",
        "_jaxpr",
        "_linear",
        "_linear_count",
        "_parent",
        "_path",
        "applied",
        "asked",
        "depth",
        "from_handler",
        "index",
        "is_later",
        "is_rule",
        "label",
        "length",
        "metadata",
        "proxies",
        "read",
        "replaced",
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
        is_later: bool = False,
        linear: frozenset[int] = frozenset(),
    ):
        self._jaxpr = jaxpr
        self._expressions = expressions
        self._consts = consts
        self._dataflow: Dataflow | None = None
        self.depth = depth
        self.length = length
        self.is_rule = is_rule
        self.is_later = is_later
        self._linear = {} if jaxpr is None else dict.fromkeys(jaxpr.invars[i] for i in linear)
        self._linear_count = 0
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
        self.from_handler: set[Any] = set()
        self.read: dict[int, Origin | None] = {}
        self.asked: set[Question] = set()
        self.applied: Applied | None = None

    def _and_around(self) -> Iterator[Frame]:
        """Yield this frame and those around it, innermost first."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame._parent

    def note(self, *question: Any) -> None:
        """Log a question, here and in the frames around."""
        if question not in self.asked:
            for frame in self._and_around():
                frame.asked.add(question)

    @property
    def is_in_rule(self) -> bool:
        """Whether it is a derivative rule or in one."""
        return any(frame.is_rule for frame in self._and_around())

    @property
    def is_program(self) -> bool:
        """Whether this is the frame of the wrapped function itself."""
        return self._parent is None and self._flow is not None

    def origin(self, atom: Any) -> Origin | None:
        """Return the origin of a variable or literal of the jaxpr."""
        if self._flow is None or type(atom) is compat.Literal:
            return None
        index = self._flow.inputs.get(atom)
        if index is not None:
            return self.input(index)
        source = self._flow.source(atom)
        # A value that passed through a handler's result is not the input any more.
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
        """Return, for a handler, how a variable or literal is computed."""
        self.note(EXPRESSION)
        return self.own_expression(atom)

    def own_expression(self, atom: Any) -> Expression:
        """Return how a variable or literal is computed, without logging the question."""
        flow = self._own_flow()
        if flow is None:
            return Unknown(getattr(atom, "aval", None), "a value of a derivative", None)
        return flow.expression(atom)

    def kind(self, atom: Any, is_parameter: Callable[[str], bool]) -> ValueKind:
        """Return, for a handler, the kind of a variable or literal."""
        # Most operands are activations. That is found without building their expressions.
        if self.is_activation(atom, is_parameter):
            return ValueKind("activation")
        return self.own_expression(atom).judged(is_parameter)

    def is_activation(self, atom: Any, is_parameter: Callable[[str], bool]) -> bool:
        """Return, for a handler, whether a variable or literal is surely an activation."""
        self.note(KINDS, is_parameter)
        if type(atom) is not compat.Literal and atom in self.proxies:
            return False  # most likely a parameter
        flow = self._own_flow()
        return flow is not None and flow.is_activation(atom, is_parameter)

    def is_linear(self, atom: Any) -> bool:
        """Return whether the program must be linear in a variable or literal."""
        if not self._linear or type(atom) is compat.Literal:
            return False
        # The results of a program in an equation may each depend on any of its operands.
        while self._linear_count < len(self._jaxpr.eqns):
            eqn = self._jaxpr.eqns[self._linear_count]
            self._linear_count += 1
            if any(type(x) is not compat.Literal and x in self._linear for x in eqn.invars):
                self._linear.update(dict.fromkeys(eqn.outvars))
        return atom in self._linear

    def _own_flow(self) -> Dataflow | None:
        if self._dataflow is None and self._jaxpr is not None and self._expressions is not None:
            self._dataflow = Dataflow(
                self._jaxpr, self._expressions, self._consts, self.from_handler
            )
        return self._dataflow

    def steps(self) -> tuple[Step, ...] | None:
        """Return, for a handler, the loops around, or None."""
        self.note(STEPS)
        found, are_over, is_known = [], False, True
        for frame in self._and_around():
            if frame.length != 0:
                found.append(Step(None if are_over else frame.index, frame.length))
            are_over |= frame.is_later
            # A handler that is asked early, while JAX still stages the loop, has only its label.
            is_known = frame._parent is not None or not frame.label
        return tuple(reversed(found)) if is_known else None

    def lengths(self) -> tuple[int | None, ...] | None:
        """Return, for a handler, how many steps the loops around have."""
        steps = self.steps()
        return None if steps is None else tuple(step.length for step in steps)

    def path(self, scopes: Sequence[str]) -> str:
        """Return, for a handler, the module path within ``scopes``."""
        self.note(PATH)
        return self.own_path(scopes)

    def own_path(self, scopes: Sequence[str]) -> str:
        """Return the module path within ``scopes``, without logging the question."""
        return join_path(self._path, *scopes)


class Place(NamedTuple):
    """Where an equation is.

    Attributes:
        frame: its frame.
        scopes: the names of the scopes around it in that frame.
        within: names of the tapped functions around it whose handlers let them run.
        untapped: whether no handler is asked.
    """

    frame: Frame
    scopes: Sequence[str]
    within: frozenset[str]
    untapped: bool = False

    def inside(
        self,
        jaxpr: Any,
        origins: Sequence[Resolve | None],
        metadata: Mapping[int, Metadata],
        *,
        label: str = "",
        loops: int = 0,
        **known: Any,
    ) -> Frame:
        """Return the frame of a jaxpr that the equation here holds.

        Args:
            jaxpr: the open jaxpr.
            origins: finds the origin of each input.
            metadata: the metadata of its inputs, by number.
            label: its label in op ids; "" for the label of this place.
            loops: how many loops and maps the equation adds.
            **known: more arguments of ``Frame``.
        """
        outer = self.frame
        where = (outer.own_path(self.scopes), label or outer.label, self.within, self.untapped)
        return Frame(jaxpr, origins, metadata, *where, outer, depth=outer.depth + loops, **known)


class Operands(NamedTuple):
    """What is known of the operands of an equation.

    Attributes:
        avals: their types.
        origins: finds the origin of each.
        metadata: their metadata, by number.
        proxies: their array proxies, by number.
        expressions: finds the expression of each; None where they are not known.
        linear: the operands in which the program must be linear, by number.
    """

    avals: Sequence[Any]
    origins: Sequence[Resolve]
    metadata: Mapping[int, Metadata]
    proxies: Mapping[int, ArrayProxy]
    expressions: Sequence[Express] | None = None
    linear: frozenset[int] = frozenset()
