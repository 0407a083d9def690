"""Ops on meshes with axes of type Explicit.

JAX propagates explicit shardings primitive by primitive. An op that is made of many primitives,
some of which cut axes, tells the sharding of its results as a whole, and leaves shardings inside to
the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def explicit_mesh(*trees: Any) -> Any:
    """Return the abstract mesh along which arrays are explicitly sharded, or None.

    Args:
        *trees: pytrees of arrays. Other leaves count as unsharded.
    """
    for leaf in jax.tree.leaves(trees):
        sharding = _sharding(leaf)
        if sharding is not None and any(part is not None for part in sharding.spec):
            return sharding.mesh
    return None


def explicit_spec(x: Any) -> tuple[Any, ...]:
    """Return the explicit mesh axes of each axis of an array."""
    sharding = _sharding(x)
    spec = () if sharding is None else tuple(sharding.spec)
    return spec + (None,) * (len(x.shape) - len(spec))


def with_auto_axes(
    mesh: Any,
    fn: Callable[..., Any],
    specs: Callable[[Any], Any],
    *operands: Any,
) -> Any:
    """Call a function with a mesh's explicit axes made Auto.

    The results are explicitly sharded again.

    Args:
        mesh: the mesh, from ``explicit_mesh``.
        fn: a function of the operands. It must not close over arrays of that mesh.
        specs: called with the results, returns a pytree with a PartitionSpec for each array.
        *operands: pytrees of arrays.
    """
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    ]
    auto = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))

    def inward(x: Any) -> Any:
        if _sharding(x) is None:
            return x
        return jax.sharding.reshard(x, NamedSharding(auto, PartitionSpec(*(None,) * x.ndim)))

    with jax.sharding.use_abstract_mesh(auto):
        found = fn(*jax.tree.map(inward, operands))
    leaves, tree = jax.tree.flatten(found)
    wanted = tree.flatten_up_to(specs(found))
    return tree.unflatten(
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(leaves, wanted, strict=True)
    )


def parts_of(mesh: Any, axes: Any) -> int:
    """Return into how many parts mesh axes cut an axis."""
    names: Sequence[str] = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def followed_spec(
    mesh: Any, spec: Sequence[Any], shape: Sequence[int], found: Sequence[int]
) -> PartitionSpec:
    """Return the spec of an array that follows another.

    Scales follow quantized values so.

    Args:
        mesh: the mesh.
        spec: mesh axes of each axis of the other array.
        shape: of the other array.
        found: of this one. Along an axis it has the same size, a number of tiles, or 1.
    """

    def follows(axes: Any, size: int, n: int) -> bool:
        if n == size or axes in (None, PartitionSpec.UNCONSTRAINED):
            return True
        return n > 1 and size % n == 0 and n % parts_of(mesh, axes) == 0

    pairs = zip(spec, shape, found, strict=True)
    return PartitionSpec(*(axes if follows(axes, size, n) else None for axes, size, n in pairs))


def _sharding(x: Any) -> NamedSharding | None:
    """Return the explicit sharding in an array's type, or None."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
