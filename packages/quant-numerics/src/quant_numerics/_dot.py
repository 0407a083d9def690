"""Quantized dot_general: integer accumulation and float rescaling."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from quant_numerics._qarray import (
    Operand,
    QArray,
    as_operand,
    qtype_of,
    split_axes,
    tile_sizes,
)
from quant_numerics._qtypes import compute_dtype, float_dtype, promote_floats

DotDimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]

INT32_MAX = 2**31 - 1


def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: DotDimensionNumbers,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """``jax.lax.dot_general`` where either side may be a QArray.

    - Both QArrays: the codes are multiplied as int8 and summed in int32 by ``lax.dot_general``,
      then rescaled in float32: times the lhs scale, then times the rhs scale (section 2.2 of
      Jacob et al. 2018, arXiv:1712.05877, without zero points).
    - One QArray ("weight-only"): its codes are converted to the dtype of the float side, which
      holds them exactly, the sum is in float32, then it is rescaled.
    - None: plain ``lax.dot_general`` in the wider of the two dtypes.

    Scales may differ along batch and free axes freely, and along contracting axes by tile: each
    tile is a dot of its own, rescaled and then summed in float32. Where one side is tiled the
    other may have one scale along that axis (it is multiplied in after the sum) or equal tiles.
    float64 replaces float32 in weight-only dots with a float64 side (under x64).

    int32 never overflows: contractions longer than ``(2**31 - 1) // (qmax_lhs * qmax_rhs)``
    (133144 for int8 by int8) are done in chunks that are summed in float32.

    An output element is non-finite where a slice that it is computed from has a non-finite value.
    With one scale per row and column that is where the float op's output is non-finite.

    Args:
      lhs: QArray or array of bfloat16, float16, float32 or float64.
      rhs: the same.
      dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
      precision: passed to ``lax.dot_general`` for float operands; integer dots are exact.
      preferred_element_type: dtype of the output, a supported float dtype; by default the wider
        of the logical dtypes (float32 for bfloat16 with float16).

    Returns:
      Array of shape (batch, lhs free, rhs free).

    Raises:
      TypeError: operands or dimension numbers that ``lax.dot_general`` refuses, a side that is
        neither a QArray nor a supported float array.
      ValueError: the two sides are tiled differently along a contracting axis.
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    (lc, rc), (lb, rb) = dimension_numbers
    dims = ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))
    dtype = output_dtype(lhs, rhs, preferred_element_type)
    if 0 in lhs.shape and any(lhs.shape[a] == 0 for a in dims[0][0]):
        return jnp.zeros(_output_shape(lhs, rhs, dims), dtype)
    if not isinstance(lhs, QArray) and not isinstance(rhs, QArray):
        common = promote_floats(lhs.dtype, rhs.dtype)
        return lax.dot_general(
            lhs.astype(common),
            rhs.astype(common),
            dims,
            precision=precision,
            preferred_element_type=promote_floats(common, dtype),
        ).astype(dtype)
    try:
        return _scaled_dot(lhs, rhs, dims, precision).astype(dtype)
    except (TypeError, ValueError, IndexError):
        # What is wrong with the shapes or dimension numbers, lax says in the caller's terms.
        _output_shape(lhs, rhs, dims)
        raise


def _output_shape(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, dims: DotDimensionNumbers
) -> tuple[int, ...]:
    structs = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs)]
    return jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), *structs).shape


def output_dtype(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, preferred: DTypeLike | None
) -> np.dtype:
    """The dtype of an op's result."""
    if preferred is not None:
        return float_dtype(preferred, "preferred_element_type")
    return promote_floats(lhs.dtype, rhs.dtype)


def int_codes(q: QArray) -> jax.Array:
    """The codes as int8, which is what integer dots and convolutions are run on."""
    return q.qvalue.astype(jnp.int8)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand, its tiled contracting axes split; all axis numbers are those of `values`."""

    values: jax.Array
    scale: jax.Array | None  # axes: batch, tiles, free
    batch: tuple[int, ...]
    tiles: tuple[int, ...]
    contract: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def scale_is_tiled(self) -> bool:
        n = len(self.batch)
        return self.scale is not None and any(
            s > 1 for s in self.scale.shape[n : n + len(self.tiles)]
        )


def _scaled_dot(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, dims: DotDimensionNumbers, precision: Any
) -> jax.Array:
    """The dot in the compute dtype; at least one side is a QArray."""
    (lc, rc), (lb, rb) = dims
    tiles = _contracted_tiles(lhs, rhs, lc, rc)
    # Codes must be converted to a dtype first: that of the float side, or int8.
    side_l = _side(lhs, _operand_dtype(rhs), lc, lb, {a: t for (a, _), t in tiles.items()})
    side_r = _side(rhs, _operand_dtype(lhs), rc, rb, {a: t for (_, a), t in tiles.items()})
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        acc = _int_dot(side_l, side_r, INT32_MAX // (qtype_of(lhs).qmax * qtype_of(rhs).qmax))
    else:
        acc = lax.dot_general(
            side_l.values,
            side_r.values,
            _dims(side_l, side_r),
            precision=precision,
            preferred_element_type=compute_dtype(side_l.values.dtype),
        )
    return _rescale(acc, side_l, side_r)


def _contracted_tiles(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, lc: Sequence[int], rc: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Tile size for each pair of contracting axes along which a scale changes."""
    tiles = {}
    for a, b in zip(lc, rc, strict=True):
        size = lhs.shape[a]
        left = lhs.scale.shape[a] if isinstance(lhs, QArray) else 1
        right = rhs.scale.shape[b] if isinstance(rhs, QArray) else 1
        if 1 not in (left, right) and left != right:
            raise ValueError(
                f"lhs axis {a} and rhs axis {b}, which are contracted, have tiles of "
                f"{size // left} and {size // right} elements; give both sides one tile size, or "
                "one of them a single scale along this axis"
            )
        if max(left, right) > 1:
            tiles[a, b] = size // max(left, right)
    return tiles


def _operand_dtype(other: QArray | jax.Array) -> np.dtype:
    return jnp.dtype(jnp.int8) if isinstance(other, QArray) else other.dtype


def _side(
    x: QArray | jax.Array,
    codes_dtype: np.dtype,
    contract: Sequence[int],
    batch: Sequence[int],
    tiles: Mapping[int, int],
) -> _Side:
    values = int_codes(x).astype(codes_dtype) if isinstance(x, QArray) else x
    values, where = split_axes(values, tiles)
    free = [a for a in range(x.ndim) if a not in {*contract, *batch}]
    tiled = [a for a in contract if a in tiles]
    scale = None
    if isinstance(x, QArray):
        scale = x.scale
        for axis, size in tile_sizes(x).items():
            if axis not in tiles:  # tiles along a free or batch axis: one scale per index
                scale = jnp.repeat(scale, size, axis=axis)
        flat = [a for a in contract if a not in tiles]
        scale = scale.transpose(*batch, *tiled, *free, *flat)
        scale = scale.reshape(scale.shape[: scale.ndim - len(flat)])
    return _Side(
        values,
        scale,
        batch=tuple(where[a] for a in batch),
        tiles=tuple(where[a] - 1 for a in tiled),
        contract=tuple(where[a] for a in contract),
        free=tuple(where[a] for a in free),
    )


def _dims(lhs: _Side, rhs: _Side) -> DotDimensionNumbers:
    return (lhs.contract, rhs.contract), (lhs.batch + lhs.tiles, rhs.batch + rhs.tiles)


def _int_dot(lhs: _Side, rhs: _Side, limit: int) -> jax.Array:
    """Sum of products of int8 codes as float32; no int32 sum has more than `limit` terms."""
    length = math.prod(lhs.values.shape[a] for a in lhs.contract)
    chunks = max(1, -(-length // limit))
    if chunks == 1:
        acc = lax.dot_general(
            lhs.values, rhs.values, _dims(lhs, rhs), preferred_element_type=jnp.int32
        )
        return acc.astype(jnp.float32)
    n = len(lhs.batch) + len(lhs.tiles)
    left, right = (_chunked(side, length, chunks) for side in (lhs, rhs))
    batch = tuple(range(n))
    acc = lax.dot_general(
        left,
        right,
        (
            ((left.ndim - 1,), (right.ndim - 1,)),
            ((*batch, left.ndim - 2), (*batch, right.ndim - 2)),
        ),
        preferred_element_type=jnp.int32,
    )
    # Before rescaling: a chunk that sums to zero must not turn an infinite scale into NaN.
    return acc.astype(jnp.float32).sum(axis=n)


def _chunked(side: _Side, length: int, chunks: int) -> jax.Array:
    """Values as (batch, tiles, free, chunks, chunk size), padded with zeros."""
    outer = side.batch + side.tiles + side.free
    values = side.values.transpose(*outer, *side.contract)
    shape = values.shape[: len(outer)]
    size = -(-length // chunks)
    padding = [(0, 0)] * len(outer) + [(0, size * chunks - length)]
    return jnp.pad(values.reshape(*shape, length), padding).reshape(*shape, chunks, size)


def _rescale(acc: jax.Array, lhs: _Side, rhs: _Side) -> jax.Array:
    """Rescales `acc`, of axes (batch, tiles, lhs free, rhs free), and sums over tiles."""
    n, tiles = len(lhs.batch), len(lhs.tiles)
    sides = [
        (side, side.scale.astype(acc.dtype).reshape(_scale_shape(side, lhs, rhs)))
        for side in (lhs, rhs)
        if side.scale is not None
    ]
    for side, scale in sides:
        if side.scale_is_tiled:
            acc = acc * scale
    tile_axes = tuple(range(n, n + tiles))
    if tiles:
        acc = acc.sum(axis=tile_axes)
    # After the sum: cheaper, and a tile that sums to zero cannot turn an infinite scale into NaN.
    for side, scale in sides:
        if not side.scale_is_tiled:
            acc = acc * scale.reshape([s for a, s in enumerate(scale.shape) if a not in tile_axes])
    return acc


def _scale_shape(side: _Side, lhs: _Side, rhs: _Side) -> tuple[int, ...]:
    assert side.scale is not None
    outer = len(side.batch) + len(side.tiles)
    shape = side.scale.shape
    if side is lhs:
        return shape + (1,) * len(rhs.free)
    return shape[:outer] + (1,) * len(lhs.free) + shape[outer:]
