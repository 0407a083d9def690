"""Restoring: the staged operation that restores a carried proxy's array."""

from __future__ import annotations

from typing import Any

import jax

from .. import compat
from ..proxy.array_proxy import ArrayProxy
from ..staging.deferred import staged
from ..staging.functions import Program


class Restoring(Program):
    """The program that restores the array of a proxy.

    Args:
        jaxpr: its closed jaxpr.
        treedef: the structure of the proxy, whose arrays are its arguments.
    """

    def __init__(self, jaxpr: Any, treedef: Any):
        super().__init__(jaxpr)
        self._treedef = treedef

    def proxy(self, values: Any) -> ArrayProxy:
        """Return the proxy of its arrays."""
        return jax.tree.unflatten(self._treedef, values)


def stage_restoring(proxy: ArrayProxy, aval: Any) -> Any:
    """Stage the restoring of a proxy. Return the array.

    Args:
        proxy: a proxy of tracers of the trace that is being staged.
        aval: the type of the array.
    """
    leaves, treedef = jax.tree.flatten(proxy)

    def restored(*leaves: Any) -> list[Any]:
        return [jax.tree.unflatten(treedef, leaves).restore().astype(aval.dtype)]

    call = staged("restored", restored, leaves)
    (array,) = compat.deferred_p.bind(*leaves, function=Restoring(call.jaxpr, treedef))
    return array


def is_restoring(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether an equation restores the array of a proxy."""
    return primitive is compat.deferred_p and type(params["function"]) is Restoring
