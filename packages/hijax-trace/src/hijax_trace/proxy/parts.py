"""Parts: the arrays that an array proxy is made of."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax


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
