"""Tiles: how moves rearrange the tiles that share scales."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .move import Move, Shape


def rearranged(how: Move) -> Sequence[int]:
    """Return the axes along which a primitive rearranges tiles."""
    params = how.params
    if how.primitive == "rev":
        return params["dimensions"]
    if how.primitive == "concatenate":
        return [params["dimension"]]
    if how.primitive == "pad":
        return [axis for axis, sizes in enumerate(params["padding_config"]) if any(sizes)]
    if how.primitive == "tile":
        return [axis for axis, count in enumerate(params["reps"]) if count != 1]
    return ()


def regrouped(old: Shape, groups: Shape, new: Shape) -> Shape | None:
    """Return the numbers of scales along the axes of a reshaped array.

    In row-major order each axis is a factor of ``groups`` tiles, along which the scale varies, and
    a factor of the elements of a tile, along which it is constant. The new axes cut this sequence
    of factors at other places. Each may have at most a varying factor and then a constant one.

    Args:
        old: the shape of the array.
        groups: how many scales it has along each axis.
        new: the shape of the result.

    Returns:
        How many scales the result has along each axis; None if the scales can't follow.
    """
    if 0 in old or math.prod(old) != math.prod(new):
        return None
    factors: list[tuple[int, bool]] = []
    for n, g in zip(old, groups, strict=True):
        for factor, varies in ((g, True), (n // g, False)):
            if factor > 1 and factors and factors[-1][1] == varies:
                factors[-1] = (factors[-1][0] * factor, varies)
            elif factor > 1:
                factors.append((factor, varies))
    result = []
    for size in new:
        varying, constant = 1, 1
        while size > 1:
            factor, varies = factors.pop(0)
            step = math.gcd(factor, size)
            if step != min(factor, size) or (varies and constant > 1):
                return None
            if step < factor:
                factors.insert(0, (factor // step, varies))
            varying, constant = (varying * step, constant) if varies else (varying, constant * step)
            size //= step
        result.append(varying)
    return tuple(result)
