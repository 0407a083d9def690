"""Partition specs of the operands of a partitioned call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def spec_of(argument: Any, axes: Sequence[int]) -> tuple[Any, ...]:
    """The mesh axes of some axes of an array."""
    spec = tuple(getattr(argument.sharding, "spec", ()))
    spec += (None,) * (len(argument.shape) - len(spec))
    return tuple(spec[i] for i in axes)


def axes_in(spec: Sequence[Any]) -> set[str]:
    """All mesh axes in a spec."""
    found: set[str] = set()
    for axes in spec:
        found |= set() if axes is None else {axes} if isinstance(axes, str) else set(axes)
    return found
