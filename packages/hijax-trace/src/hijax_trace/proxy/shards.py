"""Shards: a device's part of an array proxy, in ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import compat
from .move import MoveError

ArrayProxy = Any  # its module imports this one


class Shards(NamedTuple):
    """How the arrays of a proxy are distributed to devices.

    Attributes:
        whole: the proxy that enters ``shard_map``. It may have another form, such as quantized
            values and scales for a packed weight.
        local: the proxy that each device has, with types instead of arrays.
        axes: for each array of ``whole`` and each of its axes, the axis of the array that the
            proxy stands for which cuts it; None if every device has all of it.
        enter: returns the proxy inside of ``shard_map`` from ``local`` with its arrays.
    """

    whole: ArrayProxy
    local: ArrayProxy
    axes: tuple[tuple[int | None, ...], ...]
    enter: Callable[[Any], Any] = lambda local: local


def sliced(proxy: ArrayProxy, counts: Sequence[int]) -> Shards:
    """Return how a proxy is distributed whose shards are slices.

    Args:
        counts: into how many equal parts each axis of the array is cut.

    Raises:
        MoveError: it does not follow the slice, or several devices would need one scale.
    """
    # The first device's slice tells by its shapes which axes of which arrays are cut.
    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), proxy)
    axes: list[list[int | None]] = [[None] * leaf.ndim for leaf in jax.tree.leaves(types)]
    local = types
    for axis, count in enumerate(counts):
        if count == 1:
            continue
        before, local = local, _first(local, axis, count)
        if _kinds(jax.tree.structure(before)) != _kinds(jax.tree.structure(local)):
            raise MoveError(f"shard_map cuts axis {axis}, along which it has no parts")
        leaves = zip(axes, jax.tree.leaves(before), jax.tree.leaves(local), strict=True)
        for places, old, new in leaves:
            for place, (whole, part) in enumerate(zip(old.shape, new.shape, strict=True)):
                if whole == part:
                    continue
                if whole != part * count or places[place] is not None:
                    raise MoveError(f"shard_map cuts axis {axis} where elements share scales")
                places[place] = axis
    return Shards(proxy, local, tuple(map(tuple, axes)))


def _first(proxy: ArrayProxy, axis: int, count: int) -> ArrayProxy:
    """Return the first of equal parts along an axis."""
    limits = list(proxy.shape)
    limits[axis] //= count
    params = {"start_indices": (0,) * len(limits), "limit_indices": limits, "strides": None}
    return jax.eval_shape(lambda one: one.moved("slice", params, [one])[0], proxy)


def _kinds(structure: Any) -> Any:
    """Return the classes of a pytree's nodes, without their static fields."""
    data = structure.node_data()
    return data and data[0], list(map(_kinds, structure.children()))


class Placed(NamedTuple):
    """A proxy as an operand of a ``shard_map``.

    Attributes:
        proxy: the proxy outside.
        local: the proxy that each device has, with types instead of arrays.
        specs: the partition spec of each of its arrays.
        avals: their types inside.
        enter: see ``Shards``.
    """

    proxy: ArrayProxy
    local: ArrayProxy
    specs: tuple[jax.sharding.PartitionSpec, ...]
    avals: tuple[Any, ...]
    enter: Callable[[Any], Any] = lambda local: local


def placed(proxy: ArrayProxy, spec: jax.sharding.PartitionSpec, params: dict[str, Any]) -> Placed:
    """Return how a proxy enters a ``shard_map``.

    Raises:
        MoveError: the proxy can't be cut as the array is.
    """
    sizes = params["mesh"].shape
    names = [*spec, *[None] * (len(proxy.shape) - len(spec))]
    groups = [(one,) if isinstance(one, str) else tuple(one or ()) for one in names]
    counts = [int(np.prod([sizes[name] for name in group], dtype=int)) for group in groups]
    # Mesh axes of size 1 cut nothing. But to JAX the array varies along them, and so must these.
    uncut = [name for group, count in zip(groups, counts, strict=True) if count == 1
             for name in group]  # fmt: skip
    proxy, local, axes, enter = proxy.shards(counts)

    def spec_of(places: Sequence[int | None]) -> jax.sharding.PartitionSpec:
        found = [() if axis is None else groups[axis] for axis in places]
        if found and uncut:
            found[0] = (*found[0], *uncut)
        return jax.sharding.PartitionSpec(*(group or None for group in found))

    specs = tuple(map(spec_of, axes))
    leaves, structure = jax.tree.flatten(proxy)
    leaves = [_resharded(*pair) for pair in zip(leaves, specs, strict=True)]
    proxy = jax.tree.unflatten(structure, leaves)
    types = map(compat.typeof, leaves)
    avals = tuple(compat.shard_of(*pair, params) for pair in zip(types, specs, strict=True))
    return Placed(proxy, local, specs, avals, enter)


def _resharded(array: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """Return an array, resharded by a spec on an Explicit mesh.

    ``shard_map`` requires that of its operands. The program resharded the array that the proxy
    stands for, not the proxy's arrays.
    """
    sharding = getattr(compat.typeof(array), "sharding", None)
    if sharding is None or sharding.spec == spec:
        return array
    is_explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(array, spec) if is_explicit else array
