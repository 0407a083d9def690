"""Explicit sharding, which JAX keeps in types: of a QArray's arrays, and of an op's result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from interception_core import explicit_mesh, explicit_spec, followed_spec, with_auto_axes


def sharded_like(fn: Callable[..., Any], like: jax.Array, *operands: Any) -> Any:
    """Call a function, and shard its results as an array is sharded.

    Typical results are its quantized values and scales: along each axis a result has the size of
    `like`, a number of tiles, or 1. Without explicit mesh axes this only calls the function.
    """
    mesh = explicit_mesh(like, operands)
    if mesh is None:
        return fn(*operands)
    spec = explicit_spec(like)

    def specs(found: Any) -> Any:
        return jax.tree.map(lambda x: followed_spec(mesh, spec, like.shape, x.shape), found)

    return with_auto_axes(mesh, fn, specs, *operands)


def sharded_as(
    fn: Callable[..., Any], reference: Callable[..., Any], operands: Sequence[Any], out: Any = None
) -> Any:
    """Call an op, and shard its result as JAX's op would.

    Without explicit mesh axes in the operands and in `out` this only calls ``fn(*operands,
    out_sharding)``. `reference`, the op of JAX, is traced with arrays of the operands' shapes
    (float32 for floats and QArrays).
    """
    mesh = explicit_mesh(operands)
    if mesh is None and out is not None:
        mesh = out.mesh if isinstance(out, NamedSharding) else jax.sharding.get_abstract_mesh()
        mesh = mesh.abstract_mesh if AxisType.Explicit in mesh.axis_types else None
    if mesh is None:
        return fn(*operands, out_sharding=out)
    wanted = functools.partial(reference, out_sharding=out)
    found = jax.eval_shape(wanted, *map(_float_type, operands))
    spec = PartitionSpec(*explicit_spec(found))
    without = functools.partial(fn, out_sharding=None)
    return with_auto_axes(mesh, without, lambda _: spec, *operands)


def _float_type(x: Any) -> jax.ShapeDtypeStruct:
    """Return an operand's type as a float array; integers keep theirs."""
    values = getattr(x, "qvalue", x)
    is_float = values is not x or jnp.issubdtype(x.dtype, jnp.floating)
    dtype = jnp.float32 if is_float else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=jax.typeof(values).sharding)
