"""Placing: proxies are sharded as the program shards their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from interception_core import followed_spec

from .array_proxy import ArrayProxy, is_proxy

PLACES = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
"""Primitives that place an array, and their parameter with the sharding."""


def placed(
    params: Mapping[str, Any], name: str, proxy: ArrayProxy, bind: Callable[..., Any]
) -> ArrayProxy:
    """Return a proxy that is sharded as the program shards its array.

    A part that has no element, or no tile, for each device along an axis is whole along it. Parts
    with other axes than the array stay where they are.

    Args:
        params: of the primitive.
        name: of the parameter that holds the sharding.
        proxy: of the array.
        bind: applies the primitive to an array, with parameters.
    """
    sharding = params[name]
    if not isinstance(sharding, NamedSharding):
        return proxy
    spec = (*sharding.spec, *(None,) * (len(proxy.shape) - len(sharding.spec)))

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.ndim != len(proxy.shape):
            return leaf
        own = followed_spec(sharding.mesh, spec, proxy.shape, leaf.shape)
        return bind(leaf, **{**params, name: sharding.update(spec=own)})

    found = {}
    for field, part in proxy.parts().items():
        if is_proxy(part.value):
            found[field] = placed(params, name, part.value, bind)
        elif part.value is not None and part.axes is None:
            found[field] = jax.tree.map(one, part.value)
    return proxy.replace_parts(found) if found else proxy
