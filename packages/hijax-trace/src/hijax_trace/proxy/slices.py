"""Slices: moves of a part of an axis, which must fit tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .move import Move, MoveError, Part, numbers_of


def rest_of(how: Move, x: jax.Array) -> range:
    """Return a part's axes after those of the array."""
    return range(len(how.shape), x.ndim)


def tile_of(how: Move, x: jax.Array, axis: int) -> int:
    """Return how many elements of an axis share a scale."""
    size, groups = how.shape[axis], max(x.shape[axis], 1)
    return how.tiles.get(axis, 0) if axis in how.tiles and 1 < groups < size else size // groups


def slice_rule(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    """Move parts by ``slice``; see ``moves.move``."""
    params, ndim = how.params, len(how.shape)
    strides = params["strides"] or (1,) * ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return [_cut(how, arrays[0], list(bounds))]


def _cut(how: Move, x: jax.Array, bounds: Sequence[tuple[int, int, int]]) -> jax.Array:
    cuts = [_bounds(how, x, axis, bound) for axis, bound in enumerate(bounds)]
    cuts += [(0, x.shape[axis], 1) for axis in rest_of(how, x)]
    return lax.slice(x, *zip(*cuts, strict=True)) if cuts else x


def _bounds(
    how: Move, x: jax.Array, axis: int, bound: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Return the slice of scales for a slice of elements."""
    (start, limit, step), size, groups = bound, how.shape[axis], x.shape[axis]
    if groups == size:
        return bound
    if groups == 1 or limit <= start:
        return (0, min(groups, 1), 1)
    tile = tile_of(how, x, axis)
    if start // tile == (limit - 1) // tile:
        return (start // tile, start // tile + 1, 1)
    if step == 1 and start % tile == 0 and (limit % tile == 0 or limit == size):
        return (start // tile, -(-limit // tile), 1)
    raise MoveError(
        f"{how.primitive} from {start} to {limit} of axis {axis}, across tiles of {tile}"
    )


def dynamic_slice_rule(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    """Move parts by ``dynamic_slice``; see ``moves.move``."""
    (x,), starts, sizes = arrays, [], []
    for axis, (start, size) in enumerate(
        zip(how.operands[1:], how.params["slice_sizes"], strict=True)
    ):
        start, size = _window(how, x, axis, start, size)
        starts.append(start)
        sizes.append(size)
    rest = [x.shape[axis] for axis in rest_of(how, x)]
    dtype = how.operands[1].dtype if len(how.operands) > 1 else np.int32
    starts = [jnp.asarray(start, dtype) for start in (*starts, *([0] * len(rest)))]
    # ``dynamic_slice_p`` clips a negative start to 0, where ``lax.dynamic_slice`` would wrap it.
    return [lax.dynamic_slice(x, starts, (*sizes, *rest), allow_negative_indices=False)]


def _window(how: Move, x: jax.Array, axis: int, start: Any, size: int) -> tuple[Any, int]:
    """Return the start and number of a window's scales."""
    full, groups, tile = how.shape[axis], x.shape[axis], tile_of(how, x, axis)
    if groups == full:
        return start, size
    if groups == 1:
        return 0, min(size, 1)
    if size == full:
        return 0, groups
    if np.ndim(start) == 0 and not isinstance(start, jax.core.Tracer):
        first = min(max(int(start), 0), full - size)
        begin, end, _ = _bounds(how, x, axis, (first, first + size, 1))
        return begin, end - begin
    if size == 1:
        return lax.div(jnp.clip(start, 0, full - 1), np.asarray(tile, start.dtype)), 1
    raise MoveError(
        f"{how.primitive} of {size} elements of axis {axis}, anywhere in tiles of {tile}"
    )


def gather_rule(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    """Move parts by ``gather``; see ``moves.move``."""
    (x,), params, indices = arrays, how.params, jnp.asarray(how.operands[1])
    numbers = numbers_of(how)
    mapped = {axis: i for i, axis in enumerate(numbers.start_index_map)}
    batched = numbers.operand_batching_dims
    columns = [indices[..., i] for i in range(len(mapped))]
    sizes: list[int] = []
    for axis, size in enumerate(params["slice_sizes"]):
        size = int(size)
        if axis in batched:
            x = spread(how, x, axis)
        elif axis in mapped:
            start, size = _window(how, x, axis, columns[mapped[axis]], size)
            columns[mapped[axis]] = jnp.broadcast_to(
                jnp.asarray(start, indices.dtype), indices.shape[:-1]
            )
        else:
            begin, end, _ = _bounds(how, x, axis, (0, size, 1))
            size = end - begin
        sizes.append(size)
    rest = [x.shape[axis] for axis in rest_of(how, x)]
    batch = indices.ndim - 1
    rank = len(numbers.offset_dims) + batch
    offsets = (*numbers.offset_dims, *range(rank, rank + len(rest)))
    starts = jnp.stack(columns, -1) if columns else indices
    numbers = numbers._replace(offset_dims=offsets)
    found = lax.gather(x, starts, numbers, (*sizes, *rest), mode="clip")
    return [_filled(how, found, indices, offsets, part.is_whole)]


def spread(how: Move, x: jax.Array, axis: int) -> jax.Array:
    """Repeat scales so that each element of an axis has one."""
    size = how.shape[axis]
    if x.shape[axis] == size:
        return x
    return lax.slice_in_dim(jnp.repeat(x, tile_of(how, x, axis), axis=axis), 0, size, axis=axis)


def _filled(
    how: Move, found: jax.Array, indices: Any, offsets: Sequence[int], is_whole: bool
) -> jax.Array:
    """Put NaN where an index is out of bounds, as gather does."""
    if how.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = how.params["fill_value"]
    if fill is not None and not np.isnan(fill):
        raise MoveError(f"gather, filled with {fill}")
    # Quantized values stay as they are, because their scale is NaN: integers, and floats of one
    # byte, whose format may have no NaN.
    if not jnp.issubdtype(found.dtype, jnp.floating) or (is_whole and found.dtype.itemsize < 2):
        return found
    sizes, axes = how.params["slice_sizes"], numbers_of(how).start_index_map
    last = np.asarray([how.shape[axis] - int(sizes[axis]) for axis in axes], indices.dtype)
    last = np.broadcast_to(last, indices.shape)
    inside = jnp.all((indices >= 0) & (indices <= last), axis=-1)
    batch = [axis for axis in range(found.ndim) if axis not in offsets]
    mask = lax.broadcast_in_dim(inside, found.shape, batch)
    return jnp.where(mask, found, jnp.asarray(jnp.nan, found.dtype))


def split_rule(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    """Move parts by ``split``; see ``moves.move``."""
    axis, start, found = how.params["axis"], 0, []
    for size in how.params["sizes"]:
        bounds = [(0, n, 1) for n in how.shape]
        bounds[axis] = (start, start + int(size), 1)
        found.append(_cut(how, arrays[0], bounds))
        start += int(size)
    return found
