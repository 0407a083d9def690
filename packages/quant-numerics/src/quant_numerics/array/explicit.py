"""Shardings in types: those of a QArray's arrays and of ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from interception_core import explicit_mesh, explicit_spec, followed_spec, with_auto_axes


def sharded_like(fn: Callable[..., Any], like: jax.Array, *operands: Any) -> Any:
    """Call a function with results that are sharded as an array is.

    It only does so if the array or the operands are sharded along explicit mesh axes. Quantized
    values and scales of an array are such results.

    Args:
      fn: a function of the operands. An axis of a result has the size of the array's, a number of
        tiles, or 1.
      like: the array.
      operands: pytrees of arrays.
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
    """Call an op with the result sharded as JAX's op shards it.

    It only does so if operands are sharded along explicit mesh axes, or the result shall be.

    Args:
      fn: the op, called with the operands and, as ``out_sharding``, what is left of `out`.
      reference: the op of JAX, called with arrays of the operands' shapes, float32 where these are
        floats or quantized, and the same keyword.
      operands: arrays, and QArrays.
      out: the sharding that the caller asks for, or None.
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
