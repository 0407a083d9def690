"""StandIn: a value that a program takes for an array, kept in another form."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .. import _compat
from .forms import SAME, SLICE, Body


class StandIn(abc.ABC):
    """Base of pytrees that stand for one array, such as its codes and scales.

    An argument of a function wrapped by TraceEngine may hold stand-ins where the function expects
    arrays. The program is traced for the arrays; a handler finds the stand-in of an operand by
    ``call.stand_in(operand)``, moved as the program has moved the array: through transposes and
    the like, calls, branches, and the steps of loops. What no handler has replaced gets the
    array itself, by ``restore``.

    Attributes:
        shape: that of the array.
        dtype: that of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def restore(self) -> jax.Array:
        """Returns the array."""

    @abc.abstractmethod
    def moved(self, primitive: str, params: Mapping[str, Any]) -> StandIn | None:
        """Returns what stands for the result of a primitive of the array alone.

        Args:
            primitive: its name, such as ``"transpose"``.
            params: the parameters of the equation.

        Returns:
            The new stand-in, or None where there is none: the array is moved instead.
        """


def is_stand_in(value: Any) -> bool:
    """Returns whether ``value`` is a StandIn."""
    return isinstance(value, StandIn)


def leaves_of(stand_ins: Sequence[StandIn]) -> list[Any]:
    """Returns the arrays of all of them."""
    return jax.tree.leaves(list(stand_ins))


@dataclass(frozen=True)
class Taken:
    """The stand-ins that a body takes with its operands.

    Attributes:
        inputs: for each of them, the body's input that it stands for.
        whole: how many of them, the first, are the same in all steps; the others step along axis
            0 with the input.
        stand_ins: they themselves, as they are outside.
    """

    inputs: tuple[int, ...] = ()
    whole: int = 0
    stand_ins: tuple[StandIn, ...] = ()

    @property
    def leading(self) -> list[Any]:
        """The operands to put before the body's."""
        return leaves_of(self.stand_ins[: self.whole])

    @property
    def trailing(self) -> list[Any]:
        """The operands to put after them."""
        return leaves_of(self.stand_ins[self.whole :])

    def avals(self) -> tuple[list[Any], list[Any]]:
        """Returns the types of the body's new inputs, before and after its own."""
        trailing = [_compat.step_type(_compat.typeof(value)) for value in self.trailing]
        return [_compat.typeof(value) for value in self.leading], trailing

    def key(self) -> tuple:
        """Returns what they have in common with others that a body does the same with."""
        leading, trailing = self.avals()
        structure = jax.tree.structure(self.stand_ins)
        return self.inputs, self.whole, structure, tuple(leading), tuple(trailing)

    def inside(self, leading: Sequence[Any], trailing: Sequence[Any]) -> dict[int, StandIn]:
        """Returns the stand-ins in the body, by input, from the values of its new inputs."""
        structure = jax.tree.structure(self.stand_ins)
        found = jax.tree.unflatten(structure, [*leading, *trailing])
        return dict(zip(self.inputs, found, strict=True))


NONE_TAKEN = Taken()


def taken(body: Body, stand_ins: Mapping[int, StandIn]) -> Taken:
    """Returns which stand-ins of an equation's operands a body can take.

    Args:
        body: the body.
        stand_ins: by operand.
    """
    if not stand_ins:
        return NONE_TAKEN
    found: dict[str, list[tuple[int, StandIn]]] = {SAME: [], SLICE: []}
    invars = _compat.open_of(body.jaxpr).invars
    for i, (operand, kind) in enumerate(zip(body.inputs, body.kinds, strict=True)):
        stand_in = None if operand is None else stand_ins.get(operand)
        if stand_in is None or kind not in found:
            continue
        # In shard_map an input may be a part of the operand: a stand-in for all of it is no use.
        if (stand_in.shape == invars[i].aval.shape) if kind == SAME else steps(stand_in):
            found[kind].append((i, stand_in))
    both = [*found[SAME], *found[SLICE]]
    inputs, values = tuple(i for i, _ in both), tuple(value for _, value in both)
    return Taken(inputs, len(found[SAME]), values) if both else NONE_TAKEN


def steps(stand_in: StandIn) -> bool:
    """Returns whether each step along axis 0 has a part of every leaf."""
    return all(np.shape(leaf)[:1] == stand_in.shape[:1] for leaf in jax.tree.leaves(stand_in))
