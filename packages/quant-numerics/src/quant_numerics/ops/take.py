"""Lookups in QArrays: embeddings."""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from quant_numerics.array.explicit import sharded_as
from quant_numerics.array.packed import PackedQArray, unpack
from quant_numerics.array.qarray import Operand, QArray, as_operand, dequantize


def take(
    q: Operand,
    indices: ArrayLike,
    axis: int = 0,
    *,
    mode: Literal["fill", "clip"] = "fill",
    dequantize: bool = True,
) -> Any:
    """Gather like ``jax.numpy.take`` from a QArray, and dequantize what was taken.

    Args:
      q: QArray, PackedQArray (along another than the last axis the bits are gathered packed), or
        float array.
      indices: integers of any shape; negative ones count from the end.
      axis: the axis to take along; any granularity.
      mode: what an index that is out of range gives: "fill", NaN; "clip", the nearest.
      dequantize: False to get a QArray. An index that is out of range then has the scale NaN; where
        there is one scale for the whole axis, it is clipped.

    Returns:
      Float array of the logical dtype, or a QArray, with the axes of `indices` where `axis` was.

    Raises:
      TypeError: indices that are not integers, or a `q` that is none of these.
      ValueError: `axis` is out of range, or another mode.
      IndexError: an axis without elements.
    """
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"indices must be integers, got {indices.dtype}. Convert them with .astype."
        )
    if mode not in ("fill", "clip"):
        raise ValueError(f"mode must be 'fill' or 'clip', got {mode!r}. Choose one of them.")
    q = q if hasattr(q, "shape") else jnp.asarray(q)
    ndim = q.ndim
    if not -ndim <= operator.index(axis) < ndim:
        raise ValueError(f"axis must be from {-ndim} to {ndim - 1}, got {axis}. Choose another.")
    axis = operator.index(axis) % ndim
    if q.shape[axis] == 0:
        raise IndexError(
            f"the axis to take from must have elements, got axis {axis} of shape {q.shape}. "
            "Choose another."
        )
    if not (isinstance(q, PackedQArray) and axis < ndim - 1):
        q = as_operand(q, "the array to take from")
    run = functools.partial(_taken, axis, mode, dequantize)
    if not dequantize or isinstance(q, PackedQArray):
        return run(q, indices)
    return sharded_as(run, functools.partial(_reference, axis), (q, indices))


def _reference(axis: int, x: Any, indices: Any, out_sharding: None) -> jax.Array:
    return jnp.take(x, indices, axis)


def _taken(
    axis: int, mode: str, dequantize: bool, q: Any, indices: jax.Array, out_sharding: None = None
) -> Any:
    size, ndim = q.shape[axis], q.ndim
    # The size of the axis may not fit in a small integer dtype.
    count = indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices
    wrapped = jnp.where(count < 0, count + size, count)
    inside = (wrapped >= 0) & (wrapped < size)
    places = jnp.clip(wrapped, 0, max(size - 1, 0))
    if not isinstance(q, QArray | PackedQArray):
        rows = _gathered(q, places, axis)
        return rows if mode == "clip" else _filled(rows, inside, axis)

    tiles = q.slices.tiles

    def scales(x: Any, fill: bool = False) -> Any:
        if x is None:
            return None
        if x.shape[axis] == 1 and size != 1:
            return x.reshape(*x.shape[:axis], *(1,) * indices.ndim, *x.shape[axis + 1 :])
        rows = _gathered(x, places // tiles.get(axis, size // x.shape[axis]), axis)
        return _filled(rows, inside, axis) if fill else rows

    fill = mode == "fill" and not dequantize
    # Axes before the one that is gone are now farther from the last.
    last = axis - ndim
    ragged = tuple(
        (a if a > last else a - indices.ndim + 1, t) for a, t in q.ragged_tiles if a != last
    )
    parts = scales(q.scale, fill), scales(q.zero_point), scales(q.global_scale)
    static: dict[str, Any] = {"qtype": q.qtype, "dtype": q.dtype, "ragged_tiles": ragged}
    if isinstance(q, PackedQArray):
        packed = PackedQArray(_gathered(q.planes, places, axis), *parts, last=q.last, **static)
        rows = unpack(packed)
    else:
        rows = QArray(_gathered(q.qvalue, places, axis), *parts, **static)
    if not dequantize:
        return rows
    out = _dequantize(rows)
    return _filled(out, inside, axis) if mode == "fill" else out


_dequantize = dequantize


def _gathered(x: jax.Array, places: jax.Array, axis: int) -> jax.Array:
    return x.at[(slice(None),) * axis + (places,)].get(mode="promise_in_bounds")


def _filled(x: jax.Array, inside: jax.Array, axis: int) -> jax.Array:
    """Return `x` with NaN where an index is out of range."""
    shape = (1,) * axis + inside.shape + (1,) * (x.ndim - axis - inside.ndim)
    keep = jnp.broadcast_to(inside.reshape(shape), x.shape)
    return lax.select(keep, x, jnp.full(x.shape, jnp.nan, x.dtype))
