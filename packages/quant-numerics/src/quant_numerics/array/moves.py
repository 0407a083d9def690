"""Indexing, reshaping and joining QArrays: quantized values and scales move alike."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from hijax_trace import Move, MoveError
from quant_numerics.array.tiles import canonical_axes, ragged_tiles

Shape = tuple[int, ...]


def with_tiles(how: Move, q: Any) -> Move:
    """Return a move of a QArray with its ragged tile sizes."""
    return how._replace(tiles={q.ndim + axis: tile for axis, tile in q.ragged_tiles})


def retiled(
    results: Sequence[Any],
    q: Any,
    primitive: str,
    params: Mapping[str, Any],
    operands: Sequence[Any],
) -> Sequence[Any]:
    """Return moved QArrays with the tile sizes of their ragged axes."""
    if not q.ragged_tiles:
        return results
    how = q.move(primitive, params, operands)
    tiles = {place: how.tiles[axis] for axis, place in how.kept_axes().items()}
    return [dataclasses.replace(x, ragged_tiles=ragged_tiles(x.shape, tiles)) for x in results]


def view(q: Any, primitive: str, **params: Any) -> Any:
    """Apply a primitive that moves the elements of one array."""
    (result,) = q.moved(primitive, params, [q])
    return result


def reshape(q: Any, shape: Sequence[int]) -> Any:
    """Reshape like ``lax.reshape``.

    Raises:
      ValueError: the scales can't follow the new axes.
    """
    try:
        return view(q, "reshape", new_sizes=tuple(shape), dimensions=None)
    except MoveError as error:
        raise refused(q, f"reshape to {tuple(shape)}") from error


def concatenate(qs: Sequence[Any], axis: int) -> Any:
    """Join QArrays of one format along an axis, like ``lax.concatenate``.

    Raises:
      ValueError: arrays of other formats, or of other tiles along the axis; an axis out of range.
    """
    first = qs[0]
    (axis,) = canonical_axes(first.shape, [axis])
    (result,) = first.moved("concatenate", {"dimension": axis}, list(qs))
    return result


def index(q: Any, key: Any) -> Any:
    """Return ``q[key]`` for integers, slices, None and Ellipsis.

    Raises:
      TypeError: another key, such as an array.
      IndexError: too many axes or an index out of range.
      ValueError: a slice that cuts through tiles.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if any(not (k is None or k is ... or isinstance(k, _SLICE) or _is_int(k)) for k in keys):
        raise TypeError(
            f"the index of a QArray must be of integers, slices, None and ..., got {key!r}. Use "
            "quant_numerics.take(q, indices, axis) for arrays of indices."
        )
    real = [k for k in keys if k is not None and k is not ...]
    if keys.count(...) > 1 or len(real) > q.ndim:
        raise IndexError(
            f"indices must be at most {q.ndim}, with one ..., for shape {q.shape}, got {key!r}. "
            "Leave some out."
        )
    at = keys.index(...) if ... in keys else len(keys)
    fill = (_SLICE(None),) * (q.ndim - len(real))
    keys = (*keys[:at], *fill, *keys[at + 1 :])

    # All integers and slices become one slice. After it, axes with a negative step are reversed,
    # those of integers are dropped, and those of None are added.
    starts, limits, strides, reverse, dropped, new = [], [], [], [], [], []
    axis = out = 0
    for k in keys:
        if k is None:
            new.append(out)
            out += 1
            continue
        n = q.shape[axis]
        if isinstance(k, _SLICE):
            start, stop, step = k.indices(n)
            count = len(range(start, stop, step))
            if step < 0:
                reverse.append(axis)
                start, step = (start + (count - 1) * step if count else 0), -step
            limit = start + (count - 1) * step + 1 if count else start
            out += 1
        else:
            position = operator.index(k)
            if not -n <= position < n:
                raise IndexError(
                    f"the index of axis {axis} must be from {-n} to {n - 1}, got {position}. "
                    "Choose another."
                )
            start, limit, step = position % n, position % n + 1, 1
            dropped.append(axis)
        starts.append(start)
        limits.append(limit)
        strides.append(step)
        axis += 1
    try:
        result = view(
            q, "slice", start_indices=starts, limit_indices=limits, strides=tuple(strides)
        )
        result = view(result, "rev", dimensions=reverse) if reverse else result
    except MoveError as error:
        raise refused(q, f"[{key!r}]") from error
    result = view(result, "squeeze", dimensions=dropped) if dropped else result
    if not new:
        return result
    shape = list(result.shape)
    for place in new:
        shape.insert(place, 1)
    kept = [axis for axis in range(len(shape)) if axis not in new]
    return view(result, "broadcast_in_dim", shape=tuple(shape), broadcast_dimensions=tuple(kept))


def _is_int(k: Any) -> bool:
    return hasattr(k, "__index__") and not isinstance(k, bool) and not jnp.ndim(k)


def refused(q: Any, what: str) -> ValueError:
    """Return the error for a move that the scales don't allow."""
    return ValueError(
        f"scales must be one, one per index or one per tile along each axis after {what}, got "
        f"others for a QArray of shape {q.shape} with scales of shape {q.scale.shape}. Choose "
        "other channel or tile axes, or dequantize it first."
    )


def resolved_shape(q: Any, shape: Sequence[int]) -> Shape:
    """Return `shape` with -1 replaced by what is left.

    Raises:
      ValueError: a shape of another number of elements than `q` has.
    """
    shape = tuple(map(operator.index, shape))
    if shape.count(-1) == 1:
        rest = math.prod(n for n in shape if n != -1)
        if rest and q.size % rest == 0:
            shape = tuple(q.size // rest if n == -1 else n for n in shape)
    if math.prod(shape) != q.size or any(n < 0 for n in shape):
        raise ValueError(
            f"the new shape must have the {q.size} elements of shape {q.shape}, got {shape}. "
            "Choose another."
        )
    return shape


_SLICE = type(jnp.s_[:])
