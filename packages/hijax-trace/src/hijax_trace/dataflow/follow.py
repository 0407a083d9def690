"""Follow: the array proxies of an equation's results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from interception_core import followed_spec

from ..proxy.array_proxy import ArrayProxy, Lost, is_proxy
from ..proxy.move import MoveError
from ..proxy.moves import MOVES, SAME_ELEMENTS, data_of, narrowed, rounds, uniform_axes
from .expression import Expression
from .nodes import Operation, is_zero

PLACES = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
"""Primitives that place an array, and their parameter with the sharding."""


def follow(
    primitive: str,
    params: Mapping[str, Any],
    values: Sequence[Any],
    held: Sequence[ArrayProxy | None],
    avals: Sequence[Any],
    expression: Callable[[int], Expression | None] = lambda i: None,
) -> list[ArrayProxy | None]:
    """Return the array proxies of an equation's results.

    Returns:
        For each result its proxy; ``Lost`` if a proxy can't follow; None if none moves to it.
    """
    nothing: list[ArrayProxy | None] = [None] * len(avals)
    if rounds(primitive, params):
        return nothing
    if primitive in SAME_ELEMENTS:
        found = list(held[: len(avals)])
        if primitive == "sharding_constraint":
            found = [proxy and placed_by(primitive, params, proxy) for proxy in found]
        return found
    data = data_of(primitive, held, is_proxy) if primitive in MOVES else []
    moved = [proxy for i in data if (proxy := held[i]) is not None]
    if not moved:
        return nothing
    lost = next((proxy for proxy in moved if isinstance(proxy, Lost)), None)
    if lost is None:
        operands = [held[i] or value if i in data else value for i, value in enumerate(values)]
        # What is chosen besides, or padded with; not a predicate, which is a number outside of jit.
        beside = {"pad": [1], "select_n": range(1, len(values))}.get(primitive, ())
        for i in beside:
            if held[i] is None and (how := expression(i)) is not None and is_zero(how):
                operands[i] = np.zeros(np.shape(values[i]), moved[0].dtype)
        if primitive == "select_n" and (how := expression(0)) is not None:
            operands[0] = narrowed(values[0], uniform_axes(how, _made))
        try:
            return list(moved[0].moved(primitive, params, operands))
        except MoveError as error:
            why = str(error)
    else:
        why = lost.why
    return [Lost(aval.shape, aval.dtype, why) for aval in avals]


def _made(node: Any) -> tuple[str, Mapping[str, Any], Sequence[Any]] | None:
    """Return the primitive that computes a value, its parameters and operands, or None."""
    if not isinstance(node, Operation):
        return None
    return node.primitive.name, node.params, node.operands


def placed_by(primitive: str, params: Mapping[str, Any], proxy: ArrayProxy) -> ArrayProxy:
    """Return a proxy that is sharded by ``sharding_constraint``; see ``placed``."""

    def bind(array: jax.Array, sharding: Any, **_: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, sharding)

    return placed(params, PLACES[primitive], proxy, bind)


def gathered(params: Mapping[str, Any], proxy: ArrayProxy, is_shared: bool) -> ArrayProxy:
    """Return a proxy whose parts the devices of a ``shard_map`` gather from each other.

    Args:
        params: of ``all_gather``, and its ``"primitive"``.
        is_shared: whether the devices have the same scales, or whatever arrays it has beside those
            with an element for each of the array's. These are not gathered then.
    """
    primitive = params["primitive"]
    bound = {name: value for name, value in params.items() if name != "primitive"}

    def one(leaf: jax.Array) -> jax.Array:
        return primitive.bind(leaf, **bound)

    # Sizes don't tell: an axis of one element may be all that a device has, or one for all devices.
    parts = {
        name: jax.tree.map(one, part.value)
        for name, part in proxy.parts().items()
        if part.value is not None and (part.is_whole or not is_shared)
    }
    return proxy.replace_parts(parts)


def placed(
    params: Mapping[str, Any], name: str, proxy: ArrayProxy, bind: Callable[..., Any]
) -> ArrayProxy:
    """Return a proxy that is sharded as the program shards its array.

    A part that has no element, or no tile, for each device along an axis is whole along it. Parts
    with other axes than the array stay where they are.

    Args:
        name: of the parameter that holds the sharding.
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
