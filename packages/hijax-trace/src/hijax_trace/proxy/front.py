"""Front: moves of the first axes of parts with other axes.

An example is a weight that is packed for a kernel: a stack of packed matrices can be sliced along
the stack, but not inside a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .move import Move, MoveError, numbers_of


def leading(how: Move, count: int) -> Move:
    """Return a move restricted to the first axes.

    Args:
        count: how many axes, the first, the part has in common with the array.

    Raises:
        MoveError: the primitive moves along the other axes, too.
    """
    rule = _LEADING.get(how.primitive)
    params = None if rule is None else rule(how, count)
    if params is None:
        raise MoveError(f"{how.primitive} of axes after the first {count} of {how.shape}")
    operands = how.operands
    if how.primitive == "dynamic_slice":
        operands = operands[: 1 + count]
    if how.primitive == "select_n" and np.ndim(operands[0]):
        operands = [jnp.reshape(operands[0], operands[0].shape[:count]), *operands[1:]]
    shapes = [shape[:count] for shape in how.shapes]
    tiles = {axis: tile for axis, tile in how.tiles.items() if axis < count}
    params = {**how.params, **params}
    return how._replace(params=params, operands=operands, shapes=shapes, tiles=tiles)


def _first(name: str) -> Callable[[Move, int], dict[str, Any] | None]:
    """Return the rule for a primitive that moves along one axis."""
    return lambda how, count: {} if how.params[name] < count else None


def _leading_dimensions(how: Move, count: int) -> dict[str, Any] | None:
    return {} if all(axis < count for axis in how.params["dimensions"]) else None


def _leading_slice(how: Move, count: int) -> dict[str, Any] | None:
    params, rest = how.params, how.shape[count:]
    strides = params["strides"] or (1,) * len(how.shape)
    if any(params["start_indices"][count:]) or tuple(params["limit_indices"][count:]) != rest:
        return None
    if any(step != 1 for step in strides[count:]):
        return None
    names = ("start_indices", "limit_indices")
    return {**{name: params[name][:count] for name in names}, "strides": strides[:count]}


def _leading_dynamic_slice(how: Move, count: int) -> dict[str, Any] | None:
    sizes = tuple(map(int, how.params["slice_sizes"]))
    return {"slice_sizes": sizes[:count]} if sizes[count:] == how.shape[count:] else None


def _leading_transpose(how: Move, count: int) -> dict[str, Any] | None:
    permutation = tuple(how.params["permutation"])
    if permutation[count:] != tuple(range(count, len(permutation))):
        return None
    return {"permutation": permutation[:count]}


def _leading_reshape(how: Move, count: int) -> dict[str, Any] | None:
    rest, new = how.shape[count:], tuple(how.params["new_sizes"])
    kept = len(new) - len(rest)
    if kept < 0 or new[kept:] != rest or math.prod(new[:kept]) != math.prod(how.shape[:count]):
        return None
    return {"new_sizes": new[:kept]}


def _leading_broadcast(how: Move, count: int) -> dict[str, Any] | None:
    shape = how.params["shape"]
    rest, kept = how.shape[count:], len(shape) - (len(how.shape) - count)
    places = tuple(map(int, how.params["broadcast_dimensions"]))
    if places[count:] != tuple(range(kept, len(shape))) or tuple(shape[kept:]) != rest:
        return None
    return {"shape": shape[:kept], "broadcast_dimensions": places[:count]}


def _leading_gather(how: Move, count: int) -> dict[str, Any] | None:
    numbers, rest = numbers_of(how), how.shape[count:]
    sizes = tuple(map(int, how.params["slice_sizes"]))
    moved = numbers.start_index_map + numbers.collapsed_slice_dims + numbers.operand_batching_dims
    kept = len(numbers.offset_dims) - len(rest)
    rank = len(numbers.offset_dims) + how.operands[1].ndim - 1
    last = tuple(range(rank - len(rest), rank))
    if sizes[count:] != rest or any(axis >= count for axis in moved):
        return None
    if numbers.offset_dims[kept:] != last:
        return None
    fewer = numbers._replace(offset_dims=numbers.offset_dims[:kept])
    return {"dimension_numbers": fewer, "slice_sizes": sizes[:count]}


def _leading_reps(how: Move, count: int) -> dict[str, Any] | None:
    reps = how.params["reps"]
    return {"reps": reps[:count]} if all(n == 1 for n in reps[count:]) else None


def _leading_select(how: Move, count: int) -> dict[str, Any] | None:
    # Zeros have no known form after the first axes.
    alike = len(how.data) == len(how.operands) - 1
    return {} if alike and all(n == 1 for n in np.shape(how.operands[0])[count:]) else None


_LEADING: dict[str, Callable[[Move, int], dict[str, Any] | None]] = {
    "broadcast_in_dim": _leading_broadcast,
    "concatenate": _first("dimension"),
    "convert_element_type": lambda how, count: {},
    "dynamic_slice": _leading_dynamic_slice,
    "gather": _leading_gather,
    "reshape": _leading_reshape,
    "select_n": _leading_select,
    "rev": _leading_dimensions,
    "slice": _leading_slice,
    "split": _first("axis"),
    "squeeze": _leading_dimensions,
    "stack": lambda how, count: {} if how.params["axis"] <= count else None,
    "tile": _leading_reps,
    "transpose": _leading_transpose,
    "unstack": _first("axis"),
}
