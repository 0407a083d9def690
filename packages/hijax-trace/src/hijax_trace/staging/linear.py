"""Linear functions of derivatives, as pytrees of their residuals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import Partial

from .. import compat

Call = Callable[[list[Any]], list[Any]]
"""A linear function of a list of values. It is a pytree of residuals."""


def pushed(linear: Callable[..., list[Any]]) -> Call:
    """Return the function of ``jax.linearize`` as one of a list of tangents."""
    return Partial(_pushed, linear)


def _pushed(linear: Callable[..., list[Any]], tangents: list[Any]) -> list[Any]:
    return linear(*tangents)


def pulled(pullback: Callable[[list[Any]], Any]) -> Call:
    """Return ``jax.vjp``'s function as one that returns a list."""
    return Partial(_pulled, pullback)


def _pulled(pullback: Callable[[list[Any]], Any], cotangents: list[Any]) -> list[Any]:
    return list(pullback(cotangents))


def summed(first: Call, second: Call, places: Sequence[Sequence[int]]) -> Call:
    """Return the function of all tangents from two, each of the tangents at its ``places``."""
    return Partial(functools.partial(_summed, places), first, second)


def _summed(
    places: Sequence[Sequence[int]], first: Call, second: Call, tangents: list[Any]
) -> list[Any]:
    some = [[tangents[i] for i in part] for part in places]
    return [a + b for a, b in zip(first(some[0]), second(some[1]), strict=True)]


def merged(first: Call, second: Call, places: Sequence[Sequence[int]]) -> Call:
    """Return the function with all results from two, each with the results at its ``places``."""
    return Partial(functools.partial(_merged, places), first, second)


def _merged(
    places: Sequence[Sequence[int]], first: Call, second: Call, cotangents: list[Any]
) -> list[Any]:
    found = dict(zip(places[0], first(cotangents), strict=True))
    found.update(zip(places[1], second(cotangents), strict=True))
    return [found[i] for i in range(len(found))]


def mapped_call(
    call: Call, axis: Any, axes: Callable[[Any], list[Any]], ins: list[Any], outs: list[Any]
) -> Call:
    """Return the linear function of all examples of a ``vmap``.

    Args:
        call: the linear function of one example, with the residuals of all.
        axis: the axis, as JAX has it.
        axes: returns the mapped axis of each residual, or None, from their treedef.
        ins: the mapped axis of each argument, or None.
        outs: the same of each result.
    """
    held, treedef = jax.tree.flatten(call)
    return Partial(functools.partial(_over_all, axis, treedef, axes(treedef), ins, outs), held)


def _over_all(
    axis: Any, treedef: Any, axes: Any, ins: Any, outs: Any, held: list[Any], values: list[Any]
) -> list[Any]:
    def one(held: list[Any], values: list[Any]) -> list[Any]:
        return jax.tree.unflatten(treedef, held)(values)

    return compat.mapped(one, axis, (axes, ins), outs)(held, values)
