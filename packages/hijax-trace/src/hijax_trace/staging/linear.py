"""Linear functions of derivatives, as pytrees of their residuals."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
