"""Moving the elements of a QArray without dequantizing: codes and scales go along.

A move returns None where the scales of the result would not be one, one per index or one per tile
along each axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from quant_numerics._qarray import QArray
from quant_numerics._qtypes import FLOAT_DTYPES, float_dtype

Shape = tuple[int, ...]


def move(q: QArray, primitive_name: str, params: Mapping[str, Any]) -> QArray | None:
    """What a primitive of JAX makes of the array that `q` stands for, quantized alike.

    Args:
      q: the primitive's only operand.
      primitive_name: such as "transpose".
      params: the parameters of its equation.

    Returns:
      A QArray, or None: this primitive computes, or the scales don't fit its result.
    """
    rule = _RULES.get(primitive_name)
    return None if rule is None else rule(q, params)


def transpose(q: QArray, permutation: Sequence[int]) -> QArray:
    """``lax.transpose``."""
    return _each(q, lambda leaf: lax.transpose(leaf, permutation))


def squeeze(q: QArray, dimensions: Sequence[int]) -> QArray:
    """``lax.squeeze``."""
    return _each(q, lambda leaf: lax.squeeze(leaf, dimensions))


def expand_dims(q: QArray, dimensions: Sequence[int]) -> QArray:
    """``lax.expand_dims``."""
    return _each(q, lambda leaf: lax.expand_dims(leaf, dimensions))


def rev(q: QArray, dimensions: Sequence[int]) -> QArray:
    """``lax.rev``. The tiles of a reversed axis are reversed with their elements."""
    return _each(q, lambda leaf: lax.rev(leaf, dimensions))


def astype(q: QArray, dtype: Any) -> QArray:
    """Changes the logical dtype, to a supported float dtype."""
    return QArray(
        q.qvalue,
        q.scale,
        q.zero_point,
        q.global_scale,
        qtype=q.qtype,
        dtype=float_dtype(dtype, "the logical dtype of a QArray"),
    )


def broadcast_in_dim(q: QArray, shape: Shape, broadcast_dimensions: Sequence[int]) -> QArray:
    """``lax.broadcast_in_dim``; new elements share their scale."""

    def broadcast(leaf: jax.Array) -> jax.Array:
        if leaf is q.qvalue:
            target = shape
        else:
            sizes = dict(zip(broadcast_dimensions, leaf.shape, strict=True))
            target = tuple(sizes.get(axis, 1) for axis in range(len(shape)))
        return lax.broadcast_in_dim(leaf, target, broadcast_dimensions)

    return _each(q, broadcast)


def reshape(q: QArray, shape: Shape) -> QArray | None:
    """``lax.reshape``. None where scales would not follow the new axes, e.g. an axis with one
    scale merged with one that has many after it."""
    shape = tuple(shape)
    leaves = (q.scale, q.global_scale)
    new = [None if x is None else _regrouped(q.shape, x.shape, shape) for x in leaves]
    if any(x is not None and target is None for x, target in zip(leaves, new, strict=True)):
        return None

    def regroup(leaf: jax.Array) -> jax.Array:
        if leaf is q.qvalue:
            return lax.reshape(leaf, shape)
        target = new[1] if leaf is q.global_scale else new[0]
        assert target is not None
        return lax.reshape(leaf, target)

    return _each(q, regroup)


def _regrouped(old: Shape, groups: Shape, new: Shape) -> Shape | None:
    """Numbers of scales along the axes of shape `new`, for `groups` along those of `old`.

    In row-major order an axis is `groups` indices, along which the scale varies, over a tile
    along which it doesn't. The new axes cut this sequence of factors anew, and each may have at
    most a varying factor over a constant one.
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


def slice(
    q: QArray,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> QArray | None:
    """``lax.slice``. None where it cuts through tiles, other than within one."""
    strides = (1,) * q.ndim if strides is None else strides
    bounds = list(zip(start_indices, limit_indices, strides, strict=True))

    def cut(leaf: jax.Array) -> jax.Array | None:
        own = [_cut(n, s, bound) for n, s, bound in zip(q.shape, leaf.shape, bounds, strict=True)]
        if None in own:
            return None
        starts, limits, steps = zip(*own, strict=True) if own else ((), (), ())
        return lax.slice(leaf, starts, limits, steps)

    leaves = [None if x is None else cut(x) for x in _leaves(q)]
    if any(new is None and old is not None for new, old in zip(leaves, _leaves(q), strict=True)):
        return None
    return _like(q, leaves)


def _cut(size: int, groups: int, bound: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """The slice of `groups` scales along an axis for a slice of its `size` elements."""
    start, limit, step = bound
    if groups == size:
        return bound
    if groups == 1 or limit <= start:
        return (0, min(groups, 1), 1)
    tile = size // groups
    if start // tile == (limit - 1) // tile:
        return (start // tile, start // tile + 1, 1)
    if step == 1 and start % tile == 0 and limit % tile == 0:
        return (start // tile, limit // tile, 1)
    return None


def concatenate(qs: Sequence[QArray], axis: int) -> QArray | None:
    """``lax.concatenate``. None for arrays of different formats or tiles."""
    first = qs[0]
    if any((q.qtype, q.dtype, q.ndim) != (first.qtype, first.dtype, first.ndim) for q in qs):
        return None
    if len({q.zero_point is None for q in qs}) > 1:
        return None
    if first.global_scale is not None:
        return None  # each has its own
    axis = operator.index(axis) % first.ndim
    # Along the axis: elements per scale, which must be equal.
    if len({q.shape[axis] // max(q.scale.shape[axis], 1) for q in qs}) > 1:
        return None
    others = [[s for a, s in enumerate(q.scale.shape) if a != axis] for q in qs]
    target = [max(sizes) for sizes in zip(*others, strict=True)]
    if any(s not in (1, t) for sizes in others for s, t in zip(sizes, target, strict=True)):
        return None

    def join(leaves: Sequence[jax.Array | None], broadcast: bool) -> jax.Array | None:
        arrays = [x for x in leaves if x is not None]
        if broadcast:
            shapes = [[*target[:axis], x.shape[axis], *target[axis:]] for x in arrays]
            arrays = [
                lax.broadcast_in_dim(x, shape, range(x.ndim))
                for x, shape in zip(arrays, shapes, strict=True)
            ]
        return lax.concatenate(arrays, axis) if arrays else None

    columns = list(zip(*map(_leaves, qs), strict=True))
    return _like(first, [join(column, i > 0) for i, column in enumerate(columns)])


def index(q: QArray, key: Any) -> QArray:
    """``q[key]`` for integers, slices, None and Ellipsis.

    Raises:
      TypeError: another key, such as an array.
      IndexError: too many axes or an index out of range.
      ValueError: a slice that cuts through tiles.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if any(not (k is None or k is ... or isinstance(k, _SLICE) or _is_int(k)) for k in keys):
        raise TypeError(
            f"a QArray can be indexed with integers, slices, None and ..., got {key!r}; use "
            "quant_numerics.take(q, indices, axis) for arrays of indices"
        )
    real = [k for k in keys if k is not None and k is not ...]
    if keys.count(...) > 1 or len(real) > q.ndim:
        raise IndexError(f"{key!r} has too many indices for a QArray of shape {q.shape}")
    at = keys.index(...) if ... in keys else len(keys)
    fill = (_SLICE(None),) * (q.ndim - len(real))
    keys = (*keys[:at], *fill, *keys[at + 1 :])

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
                raise IndexError(f"index {position} is out of range for axis {axis} of size {n}")
            start, limit, step = position % n, position % n + 1, 1
            dropped.append(axis)
        starts.append(start)
        limits.append(limit)
        strides.append(step)
        axis += 1
    result = slice(q, starts, limits, strides)
    if result is None:
        raise refused(q, f"[{key!r}]")
    result = rev(result, reverse) if reverse else result
    result = squeeze(result, dropped) if dropped else result
    return expand_dims(result, new) if new else result


def _is_int(k: Any) -> bool:
    return hasattr(k, "__index__") and not isinstance(k, bool) and not jnp.ndim(k)


def refused(q: QArray, what: str) -> ValueError:
    """The error for a move that the scales don't allow."""
    return ValueError(
        f"{what} of a QArray of shape {q.shape} with scales of shape {q.scale.shape} would not "
        "have one scale, one per index or one per tile along each axis; choose other channel or "
        "tile axes, or dequantize it first"
    )


def resolved_shape(q: QArray, shape: Sequence[int]) -> Shape:
    """`shape` with -1 replaced by what is left."""
    shape = tuple(map(operator.index, shape))
    if shape.count(-1) == 1:
        rest = math.prod(n for n in shape if n != -1)
        if rest and q.size % rest == 0:
            shape = tuple(q.size // rest if n == -1 else n for n in shape)
    if math.prod(shape) != q.size or any(n < 0 for n in shape):
        raise ValueError(f"cannot reshape a QArray of shape {q.shape} to {shape}")
    return shape


def _leaves(q: QArray) -> tuple[jax.Array | None, ...]:
    return q.qvalue, q.scale, q.zero_point, q.global_scale


def _each(q: QArray, function: Callable[[jax.Array], jax.Array]) -> QArray:
    return _like(q, [None if leaf is None else function(leaf) for leaf in _leaves(q)])


def _like(q: QArray, leaves: Sequence[Any]) -> QArray:
    """A QArray of other arrays, with the static parts of `q`."""
    return QArray(*leaves, qtype=q.qtype, dtype=q.dtype)


def _converted(q: QArray, params: Mapping[str, Any]) -> QArray | None:
    dtype = jnp.dtype(params["new_dtype"])
    return astype(q, dtype) if dtype in FLOAT_DTYPES else None


def _reshaped(q: QArray, params: Mapping[str, Any]) -> QArray | None:
    if params.get("dimensions") is not None:
        return None
    return reshape(q, params["new_sizes"])


def _same(q: QArray, params: Mapping[str, Any]) -> QArray:
    return q


_SLICE = type(jnp.s_[:])

_RULES: dict[str, Callable[[QArray, Mapping[str, Any]], QArray | None]] = {
    "broadcast_in_dim": lambda q, p: broadcast_in_dim(q, p["shape"], p["broadcast_dimensions"]),
    "convert_element_type": _converted,
    "copy": _same,
    "copy_p": _same,
    "expand_dims": lambda q, p: expand_dims(q, p["dimensions"]),
    "name": _same,
    "reshape": _reshaped,
    "rev": lambda q, p: rev(q, p["dimensions"]),
    "slice": lambda q, p: slice(q, p["start_indices"], p["limit_indices"], p["strides"]),
    "squeeze": lambda q, p: squeeze(q, p["dimensions"]),
    "stop_gradient": _same,
    "transpose": lambda q, p: transpose(q, p["permutation"]),
}
