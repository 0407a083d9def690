"""Mapped: functions of one example and array proxies, in the program's own vmaps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .. import compat
from ..proxy.array_proxy import ArrayProxy
from ..proxy.parts import is_shared


class Level(NamedTuple):
    """One ``vmap`` around an operation.

    Attributes:
        axis: the name and size of its axis, as JAX has them.
        ins: the mapped axis of each operand; None for operands that are not mapped.
        outs: the same for each result.
    """

    axis: Any
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]


def mapped_over(
    levels: Sequence[Level],
    fn: Callable[[list[Any], Mapping[int, ArrayProxy]], list[Any]],
    values: list[Any],
    proxies: Mapping[int, ArrayProxy],
) -> list[Any]:
    """Run a function of one example in maps.

    Args:
        levels: the maps, outermost first.
        fn: called once with the operands and array proxies of one example. Returns its results.
        values: the operands of the whole batch.
        proxies: their array proxies, by number.
    """
    if not levels:
        return fn(values, proxies)
    level = levels[0]
    leaves, axes, inside = stepped(level, proxies)

    def one(values: list[Any], leaves: list[Any]) -> list[Any]:
        return mapped_over(levels[1:], fn, values, inside(leaves))

    ins = (list(level.ins), axes)
    return compat.mapped(one, level.axis, ins, list(level.outs))(values, leaves)


def stepped(
    level: Level, proxies: Mapping[int, ArrayProxy]
) -> tuple[list[Any], list[int | None], Callable[[list[Any]], dict[int, ArrayProxy]]]:
    """Prepare array proxies for a map.

    Args:
        level: the map.
        proxies: the proxies of the whole batch, by number of the operand.

    Returns:
        The arrays to map, their mapped axes, and a function that makes the proxies of one example
        from its arrays.
    """
    same = {i: held for i, held in proxies.items() if level.ins[i] is None}
    parts = {
        i: held.step(axis, is_mapped=True)
        for i, held in proxies.items()
        if (axis := level.ins[i]) is not None
    }
    leaves, treedef = jax.tree.flatten(parts, is_leaf=is_shared)
    axes = [None if is_shared(leaf) else 0 for leaf in leaves]
    leaves = [leaf.value if is_shared(leaf) else leaf for leaf in leaves]
    return leaves, axes, lambda leaves: {**same, **jax.tree.unflatten(treedef, leaves)}
