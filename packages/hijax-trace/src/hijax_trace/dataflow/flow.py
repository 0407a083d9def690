"""Flow: which input of a jaxpr a value is a move of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from .. import compat
from ..proxy.moves import SAME_ELEMENTS, rounds
from .holders import CHANGES, SAME, SLICE, Body, custom_body, told_by

Axes = tuple[int | tuple[int, ...] | None, ...]
"""For each axis of an input, where it is in a value: see ``interception_core.Operand.axes``."""

AxesOf = Callable[[dict[str, Any], Sequence[int], Sequence[int]], Axes | None]
"""``axes_of(params, shape_before, shape_after)``; None where the axes can't be followed."""


@functools.lru_cache(maxsize=64)
def identity(rank: int) -> Axes:
    """Return the axes of a value that does not move."""
    return tuple(range(rank))


@functools.lru_cache(maxsize=4096)
def compose(first: Axes, then: Axes) -> Axes:
    """Return where axes are after one move and then another."""

    def after(axis: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        if axis is None:
            return None
        if isinstance(axis, int):
            return then[axis]
        parts: list[int] = []
        for part in axis:
            moved = then[part]
            parts.extend(moved if isinstance(moved, tuple) else () if moved is None else (moved,))
        if not parts:
            return None
        return parts[0] if len(set(parts)) == 1 else tuple(parts)

    return tuple(after(axis) for axis in first)


def dropped(axis: int, rank: int) -> Axes:
    """Return the axes of one index along an axis."""
    return tuple(None if i == axis else i - (i > axis) for i in range(rank))


def _same(params: dict[str, Any], before: Sequence[int], after: Sequence[int]) -> Axes:
    return identity(len(before))


def _transpose(params: dict[str, Any], before: Sequence[int], after: Sequence[int]) -> Axes:
    permutation = list(params["permutation"])
    return tuple(permutation.index(axis) for axis in range(len(before)))


def _squeeze(params: dict[str, Any], before: Sequence[int], after: Sequence[int]) -> Axes:
    kept = [axis for axis in range(len(before)) if axis not in params["dimensions"]]
    return tuple(kept.index(axis) if axis in kept else None for axis in range(len(before)))


def _broadcast(params: dict[str, Any], before: Sequence[int], after: Sequence[int]) -> Axes:
    # vmap's rule computes them with NumPy, whose integers are not ints.
    places = [int(place) for place in params["broadcast_dimensions"]]
    return tuple(
        place if before[axis] == after[place] else None for axis, place in enumerate(places)
    )


def _reshape(params: dict[str, Any], before: Sequence[int], after: Sequence[int]) -> Axes | None:
    """Pair runs of axes of equal size."""
    if params.get("dimensions") is not None:
        return None
    if not all(isinstance(size, int) for size in (*before, *after)):
        return identity(len(before)) if tuple(before) == tuple(after) else None
    axes: list[int | tuple[int, ...] | None] = [None] * len(before)
    i = j = 0
    while i < len(before) and j < len(after):
        # An axis of size one can be anywhere: it is followed only where it stays in place.
        if before[i] == 1 and after[j] != 1:
            i += 1
            continue
        if after[j] == 1 and before[i] != 1:
            j += 1
            continue
        left, right = [i], [j]
        while (a := math.prod(before[k] for k in left)) != (
            b := math.prod(after[k] for k in right)
        ):
            if a < b:
                left.append(left[-1] + 1)
            else:
                right.append(right[-1] + 1)
            if left[-1] >= len(before) or right[-1] >= len(after):
                return None
        i, j = left[-1] + 1, right[-1] + 1
        left = [k for k in left if before[k] != 1] or left[:1]
        right = [k for k in right if after[k] != 1] or right[:1]
        if len(left) > 1 and len(right) > 1:
            return None
        for axis in left:
            axes[axis] = right[0] if len(right) == 1 else tuple(right)
    return tuple(axes)


AXES: dict[str, AxesOf] = {
    **dict.fromkeys((*SAME_ELEMENTS, "convert_element_type"), _same),
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
}
"""By primitive: where the axes of operand ``k``, or of operand 0, are in its result ``k``."""


Source = tuple[int, Sequence[Axes | None]]
"""The number of the input of a jaxpr that a value is a move of, and the steps of the move, the last
one first: where the axes before a step are after it. None for types that have no axes."""


class Origin(NamedTuple):
    """The wrapped function's input that a value is a move of.

    Attributes:
        path: the input's pytree path.
        axes: where the input's axes are in the value; None if its type has no axes.
    """

    path: str
    axes: Axes | None

    def moved(self, *steps: Axes | None) -> Origin:
        """Return the origin of the value after more moves, the last one first."""
        return Origin(self.path, moved_by(self.axes, steps))


class Flow:
    """How one jaxpr's values were moved, one step for each value.

    A step is found when it is asked for, and holds wherever the jaxpr is used. Which values
    handlers replaced differs from place to place, so each question walks the way to an input.

    Attributes:
        inputs: the number of each input, by variable.
        makers: the number of the equation that makes each other variable.
    """

    def __init__(self, jaxpr: Any):
        self.inputs = {var: i for i, var in enumerate(jaxpr.invars)}
        self.makers = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        # Not the jaxpr: what is kept for one must not keep it.
        self._eqns, self._results = jaxpr.eqns, getattr(jaxpr, "outvars", ())
        self._steps: dict[Any, tuple[Any, Axes | None] | None] = {}

    @functools.cached_property
    def uses(self) -> dict[Any, int]:
        """How often equations and results use each variable of a jaxpr that is whole."""
        found: dict[Any, int] = {}
        for atoms in (*(eqn.invars for eqn in self._eqns), self._results):
            for x in atoms:
                if type(x) is not compat.Literal:
                    found[x] = found.get(x, 0) + 1
        return found

    def source(self, atom: Any, replaced: Set[Any] = frozenset()) -> Source | None:
        """Return the input that a variable or literal is a move of, and the steps.

        Args:
            replaced: the variables that handlers replaced, which are not the input any more.
        """
        steps: list[Axes | None] = []
        while not isinstance(atom, compat.Literal) and atom not in replaced:
            index = self.inputs.get(atom)
            if index is not None:
                return index, steps
            if (step := self._step(atom)) is None:
                break
            atom, axes = step
            steps.append(axes)
        return None

    def _step(self, var: Any) -> tuple[Any, Axes | None] | None:
        """Return the atom that a variable is moved from, and the axes; None if it is computed."""
        if var not in self._steps:
            place, step = self.makers.get(var), None
            if place is not None:
                eqn = self._eqns[place]
                if (found := move_of(eqn, eqn.outvars.index(var))) is not None:
                    step = eqn.invars[found[0]], found[1]
            self._steps[var] = step
        return self._steps[var]


def moved_by(axes: Axes | None, steps: Sequence[Axes | None]) -> Axes | None:
    """Return where axes are after several moves, the last one first."""
    for step in reversed(steps):
        axes = None if axes is None or step is None else compose(axes, step)
    return axes


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


def move_of(eqn: Any, result: int) -> tuple[int, Axes | None] | None:
    """Return which operand a result of an equation is a move of, and the axes.

    Returns:
        The number of the operand and its axes; None if the result is not a move.
    """
    axes_of = AXES.get(eqn.primitive.name)
    if axes_of is not None:
        if rounds(eqn.primitive.name, eqn.params):
            return None
        operand = result if len(eqn.invars) > result else 0
        atoms = eqn.invars[operand], eqn.outvars[result]
        before, after = (getattr(atom.aval, "shape", None) for atom in atoms)
        if before is None or after is None:
            return None
        axes = axes_of(eqn.params, before, after)
        return None if axes is None else (operand, axes)
    told = told_by(eqn)
    if told is None:
        return None
    bodies, results = told
    if results == "carry":
        operand = bodies[0].unchanged().get(result)
        return None if operand is None else (operand, axes_inside(SAME, eqn.invars[operand].aval))
    found = {_through(body, eqn.invars, result) for body in bodies}
    return found.pop() if len(found) == 1 else None


def _through(body: Body, operands: Sequence[Any], result: int) -> tuple[int, Axes | None] | None:
    source = flow_of(body.jaxpr).source(compat.open_of(body.jaxpr).outvars[result])
    if source is None:
        return None
    index, steps = source
    operand, kind = body.inputs[index], body.kinds[index]
    if operand is None or kind == CHANGES:
        return None
    return operand, moved_by(axes_inside(kind, operands[operand].aval), steps)


def forwarded(eqn: Any) -> list[tuple[int, int]]:
    """Return which results of a call, branch or loop are operands, unchanged.

    Returns:
        Pairs of the number of a result and that of an operand.
    """
    told = told_by(eqn)
    # What a function with derivative rules returns is its own: JAX may run a rule instead.
    if told is None or custom_body(eqn.primitive, eqn.params, len(eqn.invars)) is not None:
        return []
    bodies, results = told
    if results == "carry":
        return list(bodies[0].unchanged().items())
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
