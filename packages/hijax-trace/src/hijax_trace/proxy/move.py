"""Move: an equation that moves or writes elements, and the arrays of a proxy that it moves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax import lax

from interception_core import JaxtapError

Shape = tuple[int, ...]


class MoveError(JaxtapError, ValueError):
    """An array proxy can't follow a primitive; the message says why."""


class Move(NamedTuple):
    """One equation that moves elements, or writes them into an array.

    Attributes:
        primitive: the name of its primitive.
        params: its parameters.
        operands: its operands. Arrays known to be zero are NumPy arrays. The mask of ``select_n``
            has one element along the axes where all of them are known to be equal.
        data: the numbers of the operands that are moved. The others are indices, masks, padding.
        shapes: the shapes of the operands that are moved.
        tiles: by axis, the number of elements of a tile, for axes whose last tile is shorter.
    """

    primitive: str
    params: Mapping[str, Any]
    operands: Sequence[Any]
    data: Sequence[int]
    shapes: Sequence[Shape]
    tiles: Mapping[int, int] = MappingProxyType({})

    @property
    def shape(self) -> Shape:
        """The shape of the only operand that is moved."""
        return self.shapes[0]

    def kept_axes(self) -> dict[int, int]:
        """Return which axis of the results each axis of ``tiles`` becomes.

        Raises:
            MoveError: a reshape merges or splits one of these axes.
        """
        params, ndim = self.params, len(self.shape)
        places = dict(zip(range(ndim), range(ndim), strict=True))
        if self.primitive == "transpose":
            places = {axis: place for place, axis in enumerate(params["permutation"])}
        elif self.primitive == "broadcast_in_dim":
            places = dict(enumerate(map(int, params["broadcast_dimensions"])))
        elif self.primitive == "stack":
            places = {axis: axis + (axis >= params["axis"]) for axis in places}
        elif self.primitive in ("squeeze", "unstack"):
            gone = params["dimensions"] if self.primitive == "squeeze" else [params["axis"]]
            left = [axis for axis in places if axis not in gone]
            places = {axis: place for place, axis in enumerate(left)}
        elif self.primitive == "gather":
            numbers = numbers_of(self)
            gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
            left = [axis for axis in places if axis not in gone]
            places = dict(zip(left, numbers.offset_dims, strict=True))
        elif self.primitive == "reshape":
            places = {axis: _reshaped(self, axis) for axis in self.tiles}
        return {axis: places[axis] for axis in self.tiles if axis in places}


def numbers_of(how: Move) -> lax.GatherDimensionNumbers:
    """Return the dimension numbers of a gather, as ints."""
    # vmap's rule computes them with NumPy, whose integers are not ints.
    numbers = how.params["dimension_numbers"]
    return type(numbers)(*(tuple(map(int, axes)) for axes in numbers))


def _reshaped(how: Move, axis: int) -> int:
    """Return which axis of a reshape's result an axis becomes."""
    old, new = how.shape, tuple(how.params["new_sizes"])
    before = math.prod(old[:axis])
    for place, size in enumerate(new):
        if size == old[axis] and math.prod(new[:place]) == before:
            return place
    raise MoveError(f"reshape from {old} to {new}, of axis {axis}, whose last tile is shorter")


class Part(NamedTuple):
    """One array of a proxy, such as its scales.

    Attributes:
        value: the array, a pytree of such arrays, or another proxy. Its first axes are those of
            the array that the proxy stands for. Each has that array's size, or 1, or the number of
            tiles along the axis; see ``Move.tiles``. More axes may follow.
        is_whole: whether it has the array's full size along all axes, and must keep it.
        zero: the value of a new element for which the program has a zero, such as padding.
        axes: how many of the array's axes it has, the first ones; None for all. It can't follow a
            primitive that moves along the other axes.
    """

    value: Any
    is_whole: bool = False
    zero: Any = 0
    axes: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """An array that every step of a loop has whole: see ``ArrayProxy.step``.

    Attributes:
        value: the array.
    """

    value: Any


def is_shared(value: Any) -> bool:
    """Return whether a value is a ``Shared``."""
    return isinstance(value, Shared)
