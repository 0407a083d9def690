"""Restoring: the staged call that restores a carried proxy's array."""

from __future__ import annotations

from typing import Any

import jax

from .. import compat
from ..proxy.array_proxy import ArrayProxy


class RestoringName(str):
    """The name of the call, with the structure of the proxy."""

    __slots__ = ("jaxpr", "treedef")
    jaxpr: Any
    treedef: Any


def stage_restoring(proxy: ArrayProxy, aval: Any) -> Any:
    """Stage the restoring of a proxy. Return the array.

    Args:
        proxy: a proxy of tracers of the trace that is being staged.
        aval: the type of the array.
    """
    leaves, treedef = jax.tree.flatten(proxy)

    def restored(*leaves: Any) -> list[Any]:
        return [jax.tree.unflatten(treedef, leaves).restore().astype(aval.dtype)]

    avals = list(map(compat.typeof, leaves))
    jaxpr = compat.with_consts(*compat.stage(restored, avals, compat.named_info("restored")))
    name = RestoringName("restored")
    name.jaxpr, name.treedef = jaxpr, treedef
    (array,) = compat.named_call(name, jaxpr, leaves)
    return array


def restored_proxy(primitive: Any, params: dict[str, Any], values: Any) -> ArrayProxy | None:
    """Return the proxy that an equation restores, or None."""
    if not is_restoring(primitive, params):
        return None
    return jax.tree.unflatten(params["name"].treedef, values)


def is_restoring(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether an equation restores the array of a proxy."""
    if primitive is not compat.jit_p or type(params["name"]) is not RestoringName:
        return False
    # A call that was batched or differentiated keeps the name, but has another jaxpr.
    return params["name"].jaxpr is params["jaxpr"]
