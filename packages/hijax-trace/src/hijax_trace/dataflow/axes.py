"""Axes: where a value's axes are after moves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..proxy.moves import SAME

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
    **dict.fromkeys((*SAME, "convert_element_type"), _same),
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
}
"""By primitive: where the axes of operand ``k``, or of operand 0, are in its result ``k``."""
