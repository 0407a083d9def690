"""Arrays sharded along explicit mesh axes, made whole on each device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from interception_core import explicit_mesh, with_auto_axes


def whole_results(fn: Callable[..., Any], *operands: Any) -> Any:
    """Call a function whose small results are whole on each device."""
    mesh = explicit_mesh(operands)
    if mesh is None:
        return fn(*operands)
    return with_auto_axes(
        mesh, fn, lambda found: jax.tree.map(lambda _: PartitionSpec(), found), *operands
    )


def whole(x: jax.Array) -> jax.Array:
    """Return an array replicated where explicit mesh axes sharded it."""
    if explicit_mesh(x) is None:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
