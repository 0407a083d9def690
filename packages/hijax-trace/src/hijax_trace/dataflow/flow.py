"""Flow: which input of a jaxpr a value is a move of."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import compat
from ..proxy.moves import rounds
from .axes import AXES, Axes, compose, dropped, identity
from .holders import CHANGES, SAME, SLICE, Body, custom_body, told_by


class Source(NamedTuple):
    """The input of a jaxpr that a value is a move of.

    Attributes:
        index: the number of the input.
        axes: where the input's axes are in the value; None if its type has no axes.
        through: the variables in between, the value's included.
    """

    index: int
    axes: Axes | None
    through: tuple[Any, ...]


class Origin(NamedTuple):
    """The wrapped function's input that a value is a move of.

    Attributes:
        path: the input's pytree path.
        axes: where the input's axes are in the value; None if its type has no axes.
    """

    path: str
    axes: Axes | None

    def moved(self, axes: Axes | None) -> Origin:
        """Return the origin of the value after another move."""
        both = None if self.axes is None or axes is None else compose(self.axes, axes)
        return Origin(self.path, both)


class Flow:
    """The sources of one jaxpr's values, found when they are asked for.

    Args:
        jaxpr: the open jaxpr.

    Attributes:
        inputs: the number of each input, by variable.
        makers: the number of the equation that makes each other variable.
    """

    def __init__(self, jaxpr: Any):
        self.inputs = {var: i for i, var in enumerate(jaxpr.invars)}
        self.makers = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self._eqns = jaxpr.eqns
        self._found: dict[Any, Source | None] = {}

    def source(self, atom: Any) -> Source | None:
        """Return the source of a variable or literal, or None."""
        if isinstance(atom, compat.Literal):
            return None
        if atom not in self._found:
            self._found[atom] = self._find(atom)
        return self._found[atom]

    def _find(self, var: Any) -> Source | None:
        index = self.inputs.get(var)
        if index is not None:
            return Source(index, _identity(var.aval), ())
        place = self.makers.get(var)
        if place is None:
            return None
        eqn = self._eqns[place]
        step = move_of(
            eqn.primitive,
            eqn.params,
            [atom.aval for atom in eqn.invars],
            [out.aval for out in eqn.outvars],
            eqn.outvars.index(var),
        )
        if step is None:
            return None
        operand, axes = step
        before = self.source(eqn.invars[operand])
        if before is None:
            return None
        both = None if before.axes is None or axes is None else compose(before.axes, axes)
        return Source(before.index, both, (*before.through, var))


def _identity(aval: Any) -> Axes | None:
    shape = getattr(aval, "shape", None)
    return None if shape is None else identity(len(shape))


@compat.once_per_jaxpr
def flow_of(jaxpr: Any) -> Flow:
    """Return the flow of a jaxpr."""
    return Flow(jaxpr)


def axes_inside(kind: str, aval: Any) -> Axes | None:
    """Return where an operand's axes are in a body's input."""
    shape = getattr(aval, "shape", None)
    if shape is None:
        return None
    return dropped(0, len(shape)) if kind == SLICE else identity(len(shape))


def move_of(
    primitive: Any, params: dict[str, Any], ins: list[Any], outs: list[Any], result: int
) -> tuple[int, Axes | None] | None:
    """Return which operand a result is a move of, and the axes.

    Args:
        primitive: the primitive that made the result.
        params: its parameters.
        ins: the types of its operands.
        outs: the types of its results.
        result: the number of the result.

    Returns:
        The number of the operand and its axes; None if the result is not a move.
    """
    axes_of = AXES.get(primitive.name)
    if axes_of is not None:
        if rounds(primitive.name, params):
            return None
        operand = result if len(ins) > result else 0
        before, after = (getattr(aval, "shape", None) for aval in (ins[operand], outs[result]))
        if before is None or after is None:
            return None
        axes = axes_of(params, before, after)
        return None if axes is None else (operand, axes)
    told = told_by(primitive, params, len(ins), len(outs))
    if told is None:
        return None
    bodies, results = told
    if results == "carry":
        # The last body makes the step. The condition of a while loop comes before it.
        operand = bodies[-1].unchanged().get(result)
        return None if operand is None else (operand, _identity(ins[operand]))
    found = {_through(body, ins, result) for body in bodies}
    return found.pop() if len(found) == 1 else None


def _through(body: Body, ins: list[Any], result: int) -> tuple[int, Axes | None] | None:
    source = flow_of(body.jaxpr).source(compat.open_of(body.jaxpr).outvars[result])
    if source is None or body.kinds[source.index] == CHANGES:
        return None
    operand = body.inputs[source.index]
    if operand is None:
        return None
    inside = axes_inside(body.kinds[source.index], ins[operand])
    both = None if inside is None or source.axes is None else compose(inside, source.axes)
    return operand, both


def forwarded(eqn: Any) -> list[tuple[int, int]]:
    """Return which results of a call, branch or loop are operands, unchanged.

    Returns:
        Pairs of the number of a result and that of an operand.
    """
    count = len(eqn.invars)
    told = told_by(eqn.primitive, eqn.params, count, len(eqn.outvars))
    # What a function with derivative rules returns is its own: JAX may run a rule instead.
    if told is None or custom_body(eqn.primitive, eqn.params, count) is not None:
        return []
    bodies, results = told
    if results == "carry":
        return list(bodies[-1].unchanged().items())
    found = []
    for body in bodies:
        inputs = enumerate(passed_by(body.jaxpr))
        same = [(i, k) for i, k in inputs if k is not None and body.kinds[k] == SAME]
        found.append({i: body.inputs[k] for i, k in same})
    first, *others = found
    return [
        (i, k)
        for i, k in first.items()
        if k is not None and all(other.get(i) == k for other in others)
    ]


def passed_by(jaxpr: Any) -> list[int | None]:
    """Return for each result of a jaxpr the input that it is, or None."""
    inputs = flow_of(jaxpr).inputs
    atoms = compat.open_of(jaxpr).outvars
    return [None if type(atom) is compat.Literal else inputs.get(atom) for atom in atoms]
