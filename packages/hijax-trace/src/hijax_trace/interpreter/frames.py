"""Frames: what is known of the values of one jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from interception_core import Step, ValueKind

from .. import compat
from ..dataflow.dataflow import Dataflow
from ..dataflow.expression import Expression
from ..dataflow.flow import Origin
from ..dataflow.nodes import OTHER_TRACE, Unknown
from ..proxy.array_proxy import Apart, ArrayProxy, taken_apart
from .hi_prims import Applied
from .op_ids import join_path
from .questions import ORIGIN, Metadata, Outcome, Question

_NOTHING: Metadata = MappingProxyType({})


class Known(Protocol):
    """What is known of a program's values: of atoms (``Frame``), or of tracers (``Tracers``)."""

    def origin(self, value: Any, /) -> Origin | None:
        """Return which input of the wrapped function it is a move of."""

    def metadata_of(self, value: Any, /) -> Metadata:
        """Return what handlers attached to it."""
        ...

    def proxy(self, value: Any, /) -> ArrayProxy | None:
        """Return its array proxy."""

    def expression(self, value: Any, /) -> Expression:
        """Return how it is computed."""
        ...

    def kind(self, value: Any, is_parameter: Callable[[str], bool], /) -> ValueKind:
        """Return its kind: view, derived, constant or activation."""
        ...

    def is_activation(self, value: Any, is_parameter: Callable[[str], bool], /) -> bool:
        """Return whether it is surely an activation."""
        ...

    def is_linear(self, value: Any, /) -> bool:
        """Return whether the program must be linear in it; see ``OpCall.is_linear``."""
        ...

    def is_used_once(self, value: Any, /) -> bool:
        """Return whether one equation uses it, now or later, as far as that is known."""
        ...


class Inputs(NamedTuple):
    """What is known of the inputs of a jaxpr, or of the operands of an equation, by number.

    Attributes:
        avals: their types.
        origin: returns the origin of one, or None.
        expression: returns how one is computed.
        metadata: what handlers attached to them.
        proxies: their array proxies.
        linear: those in which the program must be linear.
        apart: array proxies that are known taken apart.
    """

    avals: Sequence[Any] = ()
    origin: Callable[[int], Origin | None] = lambda index: None
    expression: Callable[[int], Expression] = lambda index: Unknown(None, OTHER_TRACE, None)
    metadata: Mapping[int, Metadata] = MappingProxyType({})
    proxies: Mapping[int, ArrayProxy] = MappingProxyType({})
    linear: frozenset[int] = frozenset()
    apart: Mapping[int, Apart] = MappingProxyType({})

    def inside(
        self,
        places: Sequence[int | None],
        avals: Sequence[Any],
        linear: frozenset[int],
        metadata: Mapping[int, Metadata] = MappingProxyType({}),
    ) -> Inputs:
        """Return what is known of the inputs of a program that JAX made of these, such as a rule.

        Args:
            places: for each input, which of these it is; None for a value of a derivative.
            avals: the types of the inputs.
            linear: as above, and so is ``metadata``.
        """

        def origin(index: int) -> Origin | None:
            place = places[index]
            return None if place is None else self.origin(place)

        def expression(index: int) -> Expression:
            place = places[index]
            if place is None:
                return Unknown(avals[index], "a value of a derivative", None)
            return self.expression(place)

        return Inputs(avals, origin, expression, metadata, linear=linear)


def operands_of(
    known: Known,
    values: Sequence[Any],
    avals: Sequence[Any],
    linear: frozenset[int] = frozenset(),
) -> Inputs:
    """Return what is known of the operands of an equation: the inputs of a program in it."""
    # These two now: a handler may attach more, and a value's proxy may be dropped.
    notes = {i: note for i, value in enumerate(values) if (note := known.metadata_of(value))}
    held = {i: one for i, value in enumerate(values) if (one := known.proxy(value)) is not None}
    return Inputs(
        avals,
        lambda index: known.origin(values[index]),
        lambda index: known.expression(values[index]),
        notes,
        held,
        linear,
    )


class Frame:
    """One jaxpr that is re-interpreted, in one place of the program.

    It keeps the log of what handlers ask. What they did can be reused wherever the answers are the
    same: see ``questions``. Whoever tells a handler something logs the question; of origins the
    frame does that itself.

    Args:
        jaxpr: the open jaxpr; None where there is only a single operation.
        path: the module path around it.
        label: the label, in op ids, of the innermost loop or branch around it.
        within: names of the tapped functions around it whose handlers let them run.
        untapped: whether no handler is asked.
        depth: how many loops and maps are around it.
        length: how many steps of a loop it is run for; see ``Body``.
        is_rule: whether it is a derivative rule, or in one.
        is_later: whether it is staged when the loops around have ended.
        is_derived: whether the program differentiates it, or what it is in.

    Attributes:
        metadata: the metadata of its values, by variable.
        proxies: their array proxies, by variable.
        index: the step's number, while the frame is staged as the body of a loop.
        replaced: variables whose values come from a handler's result.
        from_handler: those of them that the program's own operation did not compute.
        values: how its values are computed; None for a single operation.
        asked: the questions that handlers asked; see ``questions``. Of origins of inputs, with the
            answer.
        applied: in a HiPrim's rule, what handlers were asked about the HiPrim before, or None.
        call: the call that its only equation does all of, where the call may be made instead.
    """

    def __init__(
        self,
        jaxpr: Any,
        inputs: Inputs,
        path: str,
        label: str = "",
        within: frozenset[str] = frozenset(),
        untapped: bool = False,
        parent: Frame | None = None,
        consts: Sequence[Any] = (),
        depth: int = 0,
        length: int | None = 0,
        is_rule: bool = False,
        is_later: bool = False,
        is_derived: bool = False,
    ):
        self._inputs = inputs
        self.depth = depth
        self.length = length
        self.is_rule = is_rule or (parent is not None and parent.is_rule)
        self.is_later = is_later
        self.is_derived = is_derived or (parent is not None and parent.is_derived)
        self._linear = _linear_in(jaxpr, inputs.linear) if inputs.linear else frozenset()
        self.index: Any = None
        self._parent = parent
        self._path = path
        self.label = label
        self.within = within
        self.untapped = untapped
        self.metadata: dict[Any, Metadata] = {
            jaxpr.invars[i]: note for i, note in inputs.metadata.items()
        }
        self.proxies: dict[Any, ArrayProxy] = {
            jaxpr.invars[i]: proxy for i, proxy in inputs.proxies.items()
        }
        self._apart = {jaxpr.invars[i]: one for i, one in inputs.apart.items()}
        self.replaced: set[Any] = set()
        self.from_handler: set[Any] = set()
        self.asked: dict[Question, Any] = {}
        self.applied: Applied | None = None
        self.call: Any = None
        self.values: Any = None
        if jaxpr is not None:
            self.values = Dataflow(jaxpr, inputs.expression, consts, self.from_handler)

    def _and_around(self) -> Iterator[Frame]:
        """Yield this frame and those around it, innermost first."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame._parent

    def replace(self, variables: Sequence[Any], is_own: bool) -> None:
        """Mark variables as those of a handler's results.

        Args:
            is_own: whether the program's own operation computed their values.
        """
        self.replaced.update(variables)
        if not is_own:
            self.from_handler.update(variables)

    def mark_replaced(self, eqn: Any, inner: Frame | Outcome) -> None:
        """Mark an equation's results as replaced if anything inside of it was."""
        if inner.replaced:
            self.replace(eqn.outvars, is_own=not inner.from_handler)

    def note(self, *question: Any) -> None:
        """Log a question, here and in the frames around."""
        if question not in self.asked:
            for frame in self._and_around():
                frame.asked[question] = None

    @property
    def is_program(self) -> bool:
        """Whether this is the frame of the wrapped function itself."""
        return self._parent is None and self.values is not None

    def origin(self, atom: Any) -> Origin | None:
        source = self.values.flow.source(atom, self.replaced)
        if source is None:
            return None
        index, steps = source
        question = ORIGIN, index
        if question not in self.asked:
            self.asked[question] = self._inputs.origin(index)
        origin = self.asked[question]
        return origin.moved(*steps) if steps and origin is not None else origin

    def metadata_of(self, atom: Any) -> Metadata:
        return _NOTHING if type(atom) is compat.Literal else self.metadata.get(atom, _NOTHING)

    def proxy(self, atom: Any) -> ArrayProxy | None:
        return None if type(atom) is compat.Literal else self.proxies.get(atom)

    def apart(self, atom: Any) -> Apart | None:
        """Return the array proxy of a variable, taken apart, or None."""
        proxy = self.proxies.get(atom)
        if proxy is None:
            return None
        known = self._apart.get(atom)
        return taken_apart(proxy) if known is None or known.proxy is not proxy else known

    def expression(self, atom: Any) -> Expression:
        return self.values.expression(atom)

    def kind(self, atom: Any, is_parameter: Callable[[str], bool]) -> ValueKind:
        # Most operands are activations. That is found without building their expressions.
        if self.is_activation(atom, is_parameter):
            return ValueKind("activation")
        return self.expression(atom).judged(is_parameter)

    def is_activation(self, atom: Any, is_parameter: Callable[[str], bool]) -> bool:
        if type(atom) is not compat.Literal and atom in self.proxies:
            return False  # most likely a parameter
        return self.values.is_activation(atom, is_parameter)

    @property
    def has_linear(self) -> bool:
        """Whether the program must be linear in any variable."""
        return bool(self._linear)

    def is_linear(self, atom: Any) -> bool:
        return type(atom) is not compat.Literal and atom in self._linear

    def is_used_once(self, atom: Any) -> bool:
        """Return whether one equation uses a variable of the jaxpr, and nothing else."""
        if type(atom) is compat.Literal or self.values is None:
            return False
        flow = self.values.flow
        # What uses an input is more than what is seen here.
        return atom in flow.makers and flow.uses.get(atom) == 1

    def steps(self) -> tuple[Step, ...] | None:
        """Return the loops around, or None."""
        found, are_over, is_known = [], False, True
        for frame in self._and_around():
            if frame.length != 0:
                found.append(Step(None if are_over else frame.index, frame.length))
            are_over |= frame.is_later
            # A handler that is asked early, while JAX still stages the loop, has only its label.
            is_known = frame._parent is not None or not frame.label
        return tuple(reversed(found)) if is_known else None

    def lengths(self) -> tuple[int | None, ...] | None:
        """Return how many steps the loops around have."""
        steps = self.steps()
        return None if steps is None else tuple(step.length for step in steps)

    def path(self, scopes: Sequence[str]) -> str:
        """Return the module path within ``scopes``."""
        return join_path(self._path, *scopes)


def _linear_in(jaxpr: Any, inputs: frozenset[int]) -> frozenset[Any]:
    """Return the variables in which an open jaxpr must be linear, from such inputs."""
    found = {jaxpr.invars[i] for i in inputs}
    for eqn in jaxpr.eqns:
        # The results of a program in an equation may each depend on any of its operands.
        if any(type(x) is not compat.Literal and x in found for x in eqn.invars):
            found.update(eqn.outvars)
    return frozenset(found)


class Place(NamedTuple):
    """Where an equation is.

    Attributes:
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
        inputs: Inputs,
        *,
        label: str = "",
        loops: int = 0,
        **known: Any,
    ) -> Frame:
        """Return the frame of a jaxpr that the equation here holds.

        Args:
            label: its label in op ids; "" for the label of this place.
            loops: how many loops and maps the equation adds.
        """
        outer = self.frame
        where = (outer.path(self.scopes), label or outer.label, self.within, self.untapped)
        return Frame(jaxpr, inputs, *where, outer, depth=outer.depth + loops, **known)
