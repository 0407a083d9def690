"""Held: the call by which a program takes an array from the proxy that it carries."""

from __future__ import annotations

from typing import Any

import jax

from .. import compat
from ..proxy.array_proxy import ArrayProxy


class HeldName(str):
    """The name of the call. What it is called with, and how, tells the proxy."""

    __slots__ = ("jaxpr", "treedef")
    jaxpr: Any
    treedef: Any


def hold(proxy: ArrayProxy, aval: Any) -> Any:
    """Return the array of a proxy, which an interpreter knows to be that.

    Args:
        proxy: of values of the trace that is being staged.
        aval: the type of the array.
    """
    leaves, treedef = jax.tree.flatten(proxy)

    def restored(*leaves: Any) -> list[Any]:
        return [jax.tree.unflatten(treedef, leaves).restore().astype(aval.dtype)]

    avals = list(map(compat.typeof, leaves))
    jaxpr = compat.with_consts(*compat.stage(restored, avals, compat.named_info("held")))
    name = HeldName("held")
    name.jaxpr, name.treedef = jaxpr, treedef
    (array,) = compat.named_call(name, jaxpr, leaves)
    return array


def held_in(primitive: Any, params: dict[str, Any], values: Any) -> ArrayProxy | None:
    """Return the proxy that the call of an equation takes an array from; None for any other.

    One that was batched or differentiated is an ordinary call of that name.
    """
    if not is_held(primitive, params):
        return None
    return jax.tree.unflatten(params["name"].treedef, values)


def is_held(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether an equation takes an array from a proxy."""
    if primitive is not compat.jit_p or type(params["name"]) is not HeldName:
        return False
    return params["name"].jaxpr is params["jaxpr"]
