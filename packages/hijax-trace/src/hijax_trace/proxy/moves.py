"""Moves: what moving primitives do to an array proxy's parts.

Quantized values and their scales, for example, are moved alike. Along each axis the scales have the
size of the array, or 1, or one scale per tile. If the last tile is shorter than the others,
``Move.tiles`` has the length of those. Axes after those of the array, such as the rank of a LoRA
factor, stay last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .move import Move, MoveError, Part, Shape, numbers_of
from .slices import (
    dynamic_slice_rule,
    gather_rule,
    rest_of,
    slice_rule,
    split_rule,
    spread,
    tile_of,
)


def rearranged(how: Move) -> Sequence[int]:
    """Return the axes along which a primitive rearranges tiles."""
    params = how.params
    if how.primitive == "rev":
        return params["dimensions"]
    if how.primitive == "concatenate":
        return [params["dimension"]]
    if how.primitive == "pad":
        return [axis for axis, sizes in enumerate(params["padding_config"]) if any(sizes)]
    if how.primitive == "tile":
        return [axis for axis, count in enumerate(params["reps"]) if count != 1]
    return ()


def regrouped(old: Shape, groups: Shape, new: Shape) -> Shape | None:
    """Return the numbers of scales along the axes of a reshaped array.

    In row-major order each axis is a factor of ``groups`` tiles, along which the scale varies, and
    a factor of the elements of a tile, along which it is constant. The new axes cut this sequence
    of factors at other places. Each may have at most a varying factor and then a constant one.

    Args:
        groups: how many scales it has along each axis.

    Returns:
        How many scales the result has along each axis; None if the scales can't follow.
    """
    if 0 in old or math.prod(old) != math.prod(new):
        return None
    factors: list[tuple[int, bool]] = []
    for n, g in zip(old, groups, strict=True):
        for factor, varies in ((g, True), (n // g, False)):
            if factor > 1 and factors and factors[-1][1] == varies:
                factors[-1] = (factors[-1][0] * factor, varies)
            elif factor > 1:
                factors.append((factor, varies))
    result = []
    for size in new:
        varying, constant = 1, 1
        while size > 1:
            factor, varies = factors.pop(0)
            step = math.gcd(factor, size)
            if step != min(factor, size) or (varies and constant > 1):
                return None
            if step < factor:
                factors.insert(0, (factor // step, varies))
            varying, constant = (varying * step, constant) if varies else (varying, constant * step)
            size //= step
        result.append(varying)
    return tuple(result)


def move(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    """Move parts as a primitive moves the arrays that they belong to.

    Returns:
        The part of each result.

    Raises:
        MoveError: the tiles of the parts do not follow this move.
    """
    if any(axis in how.tiles for axis in rearranged(how)):
        raise MoveError(f"{how.primitive} along an axis whose last tile is shorter")
    return _RULES[how.primitive](how, arrays, part)


def data_in(primitive: str, count: int, result: int = 0) -> Sequence[int]:
    """Return the operands of a primitive that moves elements which one of its results has."""
    if primitive in ("concatenate", "stack"):
        return range(count)
    if primitive == "select_n":
        return range(1, count)
    return [result] if primitive in SAME_ELEMENTS and result < count else [0]


def data_of(primitive: str, operands: Sequence[Any], is_proxy: Callable[[Any], bool]) -> list[int]:
    """Return the numbers of the operands that a primitive moves, some of which are proxies."""
    found = data_in(primitive, len(operands))
    # A mask may choose between proxies and zeros.
    return [i for i in found if primitive != "select_n" or is_proxy(operands[i])]


def _transpose(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    (x,) = arrays
    return [lax.transpose(x, (*how.params["permutation"], *rest_of(how, x)))]


def _broadcast(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    (x,), places = arrays, [int(place) for place in how.params["broadcast_dimensions"]]
    full = how.params["shape"]
    # Copies of an element share its scale.
    target = list(full) if part.is_whole else [1] * len(full)
    if not part.is_whole:
        for axis, place in enumerate(places):
            target[place] = x.shape[axis]
    rest = [x.shape[axis] for axis in rest_of(how, x)]
    ranks = range(len(full), len(full) + len(rest))
    return [lax.broadcast_in_dim(x, (*target, *rest), (*places, *ranks))]


def _reshape(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    (x,), old, new = arrays, how.shape, tuple(how.params["new_sizes"])
    if how.params.get("dimensions") is not None:
        raise MoveError("reshape with its argument dimensions")
    rest = [x.shape[axis] for axis in rest_of(how, x)]
    if part.is_whole:
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


def _unstack(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    (x,), axis = arrays, how.params["axis"]
    tile = tile_of(how, x, axis)
    return [lax.index_in_dim(x, i // tile, axis, keepdims=False) for i in range(how.shape[axis])]


def _stack(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    axis = how.params["axis"]
    shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in how.shapes]
    return [_joined(how, [lax.expand_dims(x, [axis]) for x in arrays], axis, shapes)]


def _joined(
    how: Move, arrays: Sequence[jax.Array], axis: int, shapes: Sequence[Shape]
) -> jax.Array:
    # An operand without elements has no scale.
    pairs = [(x, shape) for x, shape in zip(arrays, shapes, strict=True) if shape[axis]]
    arrays, shapes = zip(*(pairs or zip(arrays, shapes, strict=True)), strict=True)
    tiles = {shape[axis] // max(x.shape[axis], 1) for x, shape in zip(arrays, shapes, strict=True)}
    if len(tiles) > 1:
        raise MoveError(f"{how.primitive} of tiles of {' and '.join(map(str, sorted(tiles)))}")
    # Along the other axes, operands with one scale repeat it for those with several.
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


def _pad(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    (x,) = arrays
    if not is_zero(how.operands[1]):
        raise MoveError("pad with a value that isn't known to be zero")
    config = []
    for axis, sizes in enumerate(how.params["padding_config"]):
        low, high, inner = map(int, sizes)
        groups, tile = x.shape[axis], tile_of(how, x, axis)
        if not part.is_whole and groups == 1:
            low = high = inner = 0
        elif tile > 1:
            if inner or low % tile or high % tile:
                raise MoveError(f"pad of axis {axis} by {low} and {high}, in tiles of {tile}")
            low, high = low // tile, high // tile
        config.append((low, high, inner))
    config += [(0, 0, 0)] * len(rest_of(how, x))
    return [lax.pad(x, jnp.asarray(part.zero, x.dtype), config)]


def narrowed(mask: Any, uniform: Set[int]) -> Any:
    """Return a mask with one element along the axes where all of them are equal."""
    if not np.ndim(mask) or not uniform:
        return mask
    sizes = [min(n, 1) if axis in uniform else n for axis, n in enumerate(mask.shape)]
    return mask if list(mask.shape) == sizes else lax.slice(mask, [0] * len(sizes), sizes)


def uniform_axes(
    value: Any, made: Callable[[Any], tuple[str, Mapping[str, Any], Sequence[Any]] | None]
) -> frozenset[int]:
    """Return the axes along which all elements of a mask are known to be equal.

    Args:
        value: the mask: an array, a tracer or an ``Expression``.
        made: returns the primitive that computes such a value, its parameters and operands, or
            None.
    """
    shape = _shape(value)
    every = frozenset(range(len(shape)))
    own = frozenset(axis for axis in every if shape[axis] == 1)
    if (how := made(value)) is None:
        return own
    name, params, operands = how
    if name == "broadcast_in_dim":
        inside = uniform_axes(operands[0], made)
        places = enumerate(map(int, params["broadcast_dimensions"]))
        return every - {place for axis, place in places if axis not in inside}
    if name == "transpose":
        inside = uniform_axes(operands[0], made)
        return frozenset(i for i, axis in enumerate(params["permutation"]) if axis in inside)
    if name == "iota":
        return every - {int(params["dimension"])}
    if name not in _ELEMENTWISE:
        return own
    found = every
    for operand in operands:
        if _shape(operand):  # a scalar is the same for all elements
            found &= uniform_axes(operand, made) if _shape(operand) == shape else own
    return found | own


def _shape(value: Any) -> Shape:
    return getattr(getattr(value, "aval", value), "shape", ())


def _select(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    which, *cases = how.operands
    if not all(is_zero(case) for i, case in enumerate(cases, 1) if i not in how.data):
        raise MoveError("select_n of a weight and something that is neither a weight nor zero")
    if len(arrays) == 1 and not part.is_whole:
        return [arrays[0]]
    rank, rest = len(how.shape), rest_of(how, arrays[0])
    mask = jnp.reshape(which, (1,) * rank) if np.ndim(which) == 0 else which
    sizes = [max(x.shape[axis] for x in arrays) for axis in range(rank)]
    # Where the mask differs, each element needs a separate scale.
    sizes = [n if m == 1 else full for n, m, full in zip(sizes, mask.shape, how.shape, strict=True)]
    if sizes == list(how.shape) and any(
        math.prod(x.shape[:rank]) * 2 <= math.prod(sizes) for x in arrays
    ):
        raise MoveError("select_n element by element, of elements that share scales")
    wide = {i: _spread(how, x, sizes) for i, x in zip(how.data, arrays, strict=True)}
    full = (*sizes, *(arrays[0].shape[axis] for axis in rest))
    mask = lax.broadcast_in_dim(mask, full, range(rank))
    zeros = jnp.full(full, part.zero, arrays[0].dtype)
    return [lax.select_n(mask, *(wide.get(i, zeros) for i in range(1, len(cases) + 1)))]


def _spread(how: Move, x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Repeat scales along axes where there must be more of them."""
    for axis, size in enumerate(sizes):
        count, full = x.shape[axis], how.shape[axis]
        if size in (count, full):
            x = x if size == count else spread(how, x, axis)
        elif size % count or full % size or axis in how.tiles:
            raise MoveError(f"select_n of {count} and {size} scales along axis {axis}")
        else:
            x = jnp.repeat(x, size // count, axis)
    return x


def is_zero(value: Any) -> bool:
    """Return whether a value is known while tracing, and all zeros."""
    return not isinstance(value, jax.core.Tracer) and not np.any(np.asarray(value))


def _repeat(how: Move, arrays: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    (x,) = arrays
    reps = [
        1 if not part.is_whole and x.shape[axis] == 1 else int(count)
        for axis, count in enumerate(how.params["reps"])
    ]
    return [jnp.tile(x, (*reps, *([1] * len(rest_of(how, x)))))]


Rule = Callable[[Move, Sequence[jax.Array], Part], list[jax.Array]]

_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda how, arrays, part: [
        _joined(how, arrays, how.params["dimension"], how.shapes)
    ],
    "convert_element_type": lambda how, arrays, part: list(arrays),
    "dynamic_slice": dynamic_slice_rule,
    "gather": gather_rule,
    "pad": _pad,
    "reshape": _reshape,
    # Reversing the elements reverses their tiles.
    "rev": lambda how, arrays, part: [lax.rev(arrays[0], how.params["dimensions"])],
    "select_n": _select,
    "slice": slice_rule,
    "split": split_rule,
    "squeeze": lambda how, arrays, part: [lax.squeeze(arrays[0], how.params["dimensions"])],
    "stack": _stack,
    "tile": _repeat,
    "transpose": _transpose,
    "unstack": _unstack,
}

MOVES = frozenset(_RULES)
"""Primitives that only move elements, apart from those in ``SAME_ELEMENTS``."""

SAME_ELEMENTS = frozenset(
    {
        "copy",
        "copy_p",
        "device_put",
        "mesh_cast",
        "name",
        "optimization_barrier",
        "pcast",
        "pvary",
        "reduce_precision",
        "reshard",
        "sharding_constraint",
        "stop_gradient",
    }
)
"""Primitives whose result ``k`` is operand ``k``, element by element; but see ``rounds``."""


_ELEMENTWISE = SAME_ELEMENTS | frozenset(
    {"add", "convert_element_type", "max", "min", "mul", "sub"}
    | {"eq", "ge", "gt", "le", "lt", "ne"}
    | {"and", "not", "or", "xor"}
)
"""Primitives whose element of a mask depends on the same elements of their operands alone."""

VIEWS = SAME_ELEMENTS | MOVES
"""Primitives that move elements and compute none, so that scales can be moved alike."""


def rounds(primitive: str, params: Mapping[str, Any]) -> bool:
    """Return whether a primitive rounds floats to fewer bits than bfloat16 has.

    Then its result has other elements than its operand, and scales of these are not its scales.
    """
    if primitive == "reduce_precision":
        return params["mantissa_bits"] < _BFLOAT16_BITS
    if primitive != "convert_element_type" or not jnp.issubdtype(params["new_dtype"], jnp.floating):
        return False
    return jnp.finfo(params["new_dtype"]).nmant < _BFLOAT16_BITS


_BFLOAT16_BITS = jnp.finfo(jnp.bfloat16).nmant


def leading(how: Move, count: int) -> Move:
    """Return a move restricted to the first axes, for parts with other axes after them.

    An example is a weight that is packed for a kernel: a stack of packed matrices can be sliced
    along the stack, but not inside a matrix.

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
