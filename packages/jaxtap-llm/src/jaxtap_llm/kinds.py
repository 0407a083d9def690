"""Layers that differ in their parameters: their kinds, and how they are stacked for a scan."""

from __future__ import annotations

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Kind:
    """What parameters a layer has. The fields are those of ``Config``, for one layer."""

    inner: int
    kv_heads: int
    head_size: int
    experts: int = 0
    shared_inner: int = 0
    mixer: str = "attention"
    local: bool = False
    keeps: bool = True
    has_values: bool = True


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers whose parameters are stacked: those of one kind, as far apart from each other.

    Attributes:
        name: of the parameters in a model's tree.
        layers: the layers, in order.
    """

    name: str
    layers: tuple[int, ...]


def segments_of(kinds: tuple[Kind, ...], layers: int) -> tuple[tuple[Stack, ...], ...]:
    """Return the stacks of a model, those together that a scan runs in turn.

    Layers of a pattern that repeats, such as three of one kind and one of another, are one segment
    with a stack for each place in the pattern. So a program has each place once.

    Args:
        kinds: of each layer; none where all layers are alike.
        layers: how many there are.
    """
    if len(set(kinds)) < 2:
        return ((Stack("layers", tuple(range(layers))),),)
    found, start = [], 0
    while start < layers:
        period = max(range(1, layers - start + 1), key=lambda p: (_covered(kinds, start, p), -p))
        end = start + _covered(kinds, start, period)
        found.append(
            tuple(
                Stack(f"layers_{first}", tuple(range(first, end, period)))
                for first in range(start, start + period)
            )
        )
        start = end
    return tuple(found)


def _covered(kinds: tuple[Kind, ...], start: int, period: int) -> int:
    """Return how many layers from the start on repeat the first ones, in whole periods.

    A pattern that does not repeat covers one layer at most: the others may begin another pattern.
    """
    same = itertools.takewhile(
        lambda i: kinds[i] == kinds[i - period], range(start + period, len(kinds))
    )
    repeats = 1 + len(list(same)) // period
    return repeats * period if repeats > 1 or period == 1 else 0
