"""Moves: what a primitive that only moves elements does to the arrays that stand for another one.

An array and its scales, say, are moved alike: each axis of the scales has the size of the array's,
or 1, or a divisor of it, a scale for each tile. Where the last tile is shorter than the others,
``Move.tiles`` says how long these are. Axes after those of the array, such as the rank of a factor,
ride along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .move import Move, MoveError, Shape, numbers_of
from .tiles import rearranged, regrouped


def move(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    """Move arrays as a primitive moves those that they belong to.

    Args:
        how: the equation.
        arrays: one for each operand that is moved.
        is_whole: whether they have the full size along every axis, and must keep it.
        zero: what new elements are where the program has zeros.

    Returns:
        One array for each result.

    Raises:
        MoveError: the tiles of the arrays, or what they are, do not follow this move.
    """
    if any(axis in how.tiles for axis in rearranged(how)):
        raise MoveError(f"{how.primitive} along an axis whose last tile is shorter")
    return _RULES[how.primitive](how, arrays, is_whole, zero)


def data_of(primitive: str, operands: Sequence[Any], is_proxy: Callable[[Any], bool]) -> list[int]:
    """Return which operands of a primitive are moved to its results."""
    if primitive in ("concatenate", "stack"):
        return list(range(len(operands)))
    if primitive == "select_n":
        return [i for i, operand in enumerate(operands) if i and is_proxy(operand)]
    return [0]


def _rest(how: Move, x: jax.Array) -> range:
    return range(len(how.shape), x.ndim)


def _tile(how: Move, x: jax.Array, axis: int) -> int:
    size, groups = how.shape[axis], max(x.shape[axis], 1)
    return how.tiles.get(axis, 0) if axis in how.tiles and 1 < groups < size else size // groups


def _cast(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    return list(arrays)


def _transpose(
    how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any
) -> list[jax.Array]:
    (x,) = arrays
    return [lax.transpose(x, (*how.params["permutation"], *_rest(how, x)))]


def _squeeze(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    return [lax.squeeze(arrays[0], how.params["dimensions"])]


def _rev(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    # The tiles of a reversed axis are reversed with their elements.
    return [lax.rev(arrays[0], how.params["dimensions"])]


def _broadcast(
    how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any
) -> list[jax.Array]:
    (x,), places = arrays, [int(place) for place in how.params["broadcast_dimensions"]]
    full = how.params["shape"]
    # New elements share their scale.
    target = list(full) if is_whole else [1] * len(full)
    if not is_whole:
        for axis, place in enumerate(places):
            target[place] = x.shape[axis]
    rest = [x.shape[axis] for axis in _rest(how, x)]
    ranks = range(len(full), len(full) + len(rest))
    return [lax.broadcast_in_dim(x, (*target, *rest), (*places, *ranks))]


def _reshape(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    (x,), old, new = arrays, how.shape, tuple(how.params["new_sizes"])
    if how.params.get("dimensions") is not None:
        raise MoveError("reshape with its argument dimensions")
    rest = [x.shape[axis] for axis in _rest(how, x)]
    if is_whole:
        return [lax.reshape(x, (*new, *rest))]
    # Axes with a shorter tile stay as they are; what is between them is regrouped.
    groups: list[int] = []
    from_old = from_new = 0
    for axis, place in (*sorted(how.kept_axes().items()), (len(old), len(new))):
        run = regrouped(old[from_old:axis], x.shape[from_old:axis], new[from_new:place])
        if run is None:
            scales = x.shape[: len(old)]
            raise MoveError(f"reshape from {old} to {new}, of scales of shape {scales}")
        groups += [*run, *x.shape[axis : min(axis + 1, len(old))]]
        from_old, from_new = axis + 1, place + 1
    return [lax.reshape(x, (*groups, *rest))]


def _slice(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    params, ndim = how.params, len(how.shape)
    strides = params["strides"] or (1,) * ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return [_cut(how, arrays[0], list(bounds))]


def _cut(how: Move, x: jax.Array, bounds: Sequence[tuple[int, int, int]]) -> jax.Array:
    cuts = [_bounds(how, x, axis, bound) for axis, bound in enumerate(bounds)]
    cuts += [(0, x.shape[axis], 1) for axis in _rest(how, x)]
    return lax.slice(x, *zip(*cuts, strict=True)) if cuts else x


def _bounds(
    how: Move, x: jax.Array, axis: int, bound: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Return the slice of the scales along an axis, for a slice of the elements."""
    (start, limit, step), size, groups = bound, how.shape[axis], x.shape[axis]
    if groups == size:
        return bound
    if groups == 1 or limit <= start:
        return (0, min(groups, 1), 1)
    tile = _tile(how, x, axis)
    if start // tile == (limit - 1) // tile:
        return (start // tile, start // tile + 1, 1)
    if step == 1 and start % tile == 0 and (limit % tile == 0 or limit == size):
        return (start // tile, -(-limit // tile), 1)
    raise MoveError(
        f"{how.primitive} from {start} to {limit} of axis {axis}, across tiles of {tile}"
    )


def _dynamic_slice(
    how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any
) -> list[jax.Array]:
    (x,), starts, sizes = arrays, [], []
    for axis, (start, size) in enumerate(
        zip(how.operands[1:], how.params["slice_sizes"], strict=True)
    ):
        start, size = _window(how, x, axis, start, size)
        starts.append(start)
        sizes.append(size)
    rest = [x.shape[axis] for axis in _rest(how, x)]
    dtype = how.operands[1].dtype if len(how.operands) > 1 else np.int32
    starts = [jnp.asarray(start, dtype) for start in (*starts, *([0] * len(rest)))]
    # The primitive takes a negative start for 0.
    return [lax.dynamic_slice(x, starts, (*sizes, *rest), allow_negative_indices=False)]


def _window(how: Move, x: jax.Array, axis: int, start: Any, size: int) -> tuple[Any, int]:
    """Return where the scales of a part of an axis begin, and how many they are."""
    full, groups, tile = how.shape[axis], x.shape[axis], _tile(how, x, axis)
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


def _gather(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    (x,), params, indices = arrays, how.params, jnp.asarray(how.operands[1])
    numbers = numbers_of(how)
    mapped = {axis: i for i, axis in enumerate(numbers.start_index_map)}
    batched = numbers.operand_batching_dims
    columns = [indices[..., i] for i in range(len(mapped))]
    sizes: list[int] = []
    for axis, size in enumerate(params["slice_sizes"]):
        size = int(size)
        if axis in batched:
            x = _spread(how, x, axis)
        elif axis in mapped:
            start, size = _window(how, x, axis, columns[mapped[axis]], size)
            columns[mapped[axis]] = jnp.broadcast_to(
                jnp.asarray(start, indices.dtype), indices.shape[:-1]
            )
        else:
            begin, end, _ = _bounds(how, x, axis, (0, size, 1))
            size = end - begin
        sizes.append(size)
    rest = [x.shape[axis] for axis in _rest(how, x)]
    batch = indices.ndim - 1
    rank = len(numbers.offset_dims) + batch
    offsets = (*numbers.offset_dims, *range(rank, rank + len(rest)))
    starts = jnp.stack(columns, -1) if columns else indices
    numbers = numbers._replace(offset_dims=offsets)
    found = lax.gather(x, starts, numbers, (*sizes, *rest), mode="clip")
    return [_filled(how, found, indices, offsets, is_whole)]


def _spread(how: Move, x: jax.Array, axis: int) -> jax.Array:
    """Give each element of an axis a scale of its own."""
    size = how.shape[axis]
    if x.shape[axis] == size:
        return x
    return lax.slice_in_dim(jnp.repeat(x, _tile(how, x, axis), axis=axis), 0, size, axis=axis)


def _filled(
    how: Move, found: jax.Array, indices: Any, offsets: Sequence[int], is_whole: bool
) -> jax.Array:
    """Put NaN where an index was out of bounds, if the program has it there."""
    if how.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = how.params["fill_value"]
    if fill is not None and not np.isnan(fill):
        raise MoveError(f"gather, filled with {fill}")
    # Quantized values need not: their scale is NaN. Formats of less than two bytes may have none.
    if not jnp.issubdtype(found.dtype, jnp.floating) or (is_whole and found.dtype.itemsize < 2):
        return found
    sizes, axes = how.params["slice_sizes"], numbers_of(how).start_index_map
    last = np.asarray([how.shape[axis] - int(sizes[axis]) for axis in axes], indices.dtype)
    last = np.broadcast_to(last, indices.shape)
    inside = jnp.all((indices >= 0) & (indices <= last), axis=-1)
    batch = [axis for axis in range(found.ndim) if axis not in offsets]
    mask = lax.broadcast_in_dim(inside, found.shape, batch)
    return jnp.where(mask, found, jnp.asarray(jnp.nan, found.dtype))


def _split(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    axis, start, found = how.params["axis"], 0, []
    for size in how.params["sizes"]:
        bounds = [(0, n, 1) for n in how.shape]
        bounds[axis] = (start, start + int(size), 1)
        found.append(_cut(how, arrays[0], bounds))
        start += int(size)
    return found


def _unstack(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    (x,), axis = arrays, how.params["axis"]
    tile = _tile(how, x, axis)
    return [lax.index_in_dim(x, i // tile, axis, keepdims=False) for i in range(how.shape[axis])]


def _concatenate(
    how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any
) -> list[jax.Array]:
    return [_joined(how, arrays, how.params["dimension"], how.shapes)]


def _stack(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    axis = how.params["axis"]
    shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in how.shapes]
    return [_joined(how, [lax.expand_dims(x, [axis]) for x in arrays], axis, shapes)]


def _joined(
    how: Move, arrays: Sequence[jax.Array], axis: int, shapes: Sequence[Shape]
) -> jax.Array:
    # What has no elements brings no scale.
    pairs = [(x, shape) for x, shape in zip(arrays, shapes, strict=True) if shape[axis]]
    arrays, shapes = zip(*(pairs or zip(arrays, shapes, strict=True)), strict=True)
    tiles = {shape[axis] // max(x.shape[axis], 1) for x, shape in zip(arrays, shapes, strict=True)}
    if len(tiles) > 1:
        raise MoveError(f"{how.primitive} of tiles of {' and '.join(map(str, sorted(tiles)))}")
    # Beside the axis, one that has a scale for each index gives all of them one.
    target = [max(sizes) for sizes in zip(*(x.shape for x in arrays), strict=True)]
    wide = [(*target[:axis], x.shape[axis], *target[axis + 1 :]) for x in arrays]
    if any(
        size not in (1, most)
        for x, shape in zip(arrays, wide, strict=True)
        for size, most in zip(x.shape, shape, strict=True)
    ):
        raise MoveError(f"{how.primitive} of scales of shapes {[x.shape for x in arrays]}")
    same = [
        lax.broadcast_in_dim(x, shape, range(x.ndim)) if x.shape != shape else x
        for x, shape in zip(arrays, wide, strict=True)
    ]
    return lax.concatenate(same, axis)


def _pad(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    (x,) = arrays
    if not is_zero(how.operands[1]):
        raise MoveError("pad with a value that isn't known to be zero")
    config = []
    for axis, sizes in enumerate(how.params["padding_config"]):
        low, high, inner = map(int, sizes)
        groups, tile = x.shape[axis], _tile(how, x, axis)
        if not is_whole and groups == 1:
            low = high = inner = 0
        elif tile > 1:
            if inner or low % tile or high % tile:
                raise MoveError(f"pad of axis {axis} by {low} and {high}, in tiles of {tile}")
            low, high = low // tile, high // tile
        config.append((low, high, inner))
    config += [(0, 0, 0)] * len(_rest(how, x))
    return [lax.pad(x, jnp.asarray(zero, x.dtype), config)]


def _select(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    which, *cases = how.operands
    if len(arrays) > 1 or not all(
        is_zero(case) for i, case in enumerate(cases, 1) if i not in how.data
    ):
        raise MoveError("select_n of anything but one value and zeros")
    (x,) = arrays
    if not is_whole:
        return [x]
    others = jnp.full_like(x, zero)
    return [
        lax.select_n(which, *(x if i in how.data else others for i in range(1, len(cases) + 1)))
    ]


def is_zero(value: Any) -> bool:
    """Return whether a value is known now, and all of it is zero."""
    return not isinstance(value, jax.core.Tracer) and not np.any(np.asarray(value))


def _repeat(how: Move, arrays: Sequence[jax.Array], is_whole: bool, zero: Any) -> list[jax.Array]:
    (x,) = arrays
    reps = [
        1 if not is_whole and x.shape[axis] == 1 else int(count)
        for axis, count in enumerate(how.params["reps"])
    ]
    return [jnp.tile(x, (*reps, *([1] * len(_rest(how, x)))))]


Rule = Callable[[Move, Sequence[jax.Array], bool, Any], list[jax.Array]]

_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "convert_element_type": _cast,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _rev,
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _repeat,
    "transpose": _transpose,
    "unstack": _unstack,
}

MOVES = frozenset(_RULES)
"""Primitives that only move elements, those aside that leave all as it is: see ``axes.SAME``."""
