"""In which dtypes an op of two operands multiplies and sums.

An op asks ``arithmetic(lhs, rhs, precision)``, converts each side with ``numbers``, and multiplies
the result by the effective scales. A ``Side`` is in the layout of the computation.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quant_numerics.array.qarray import QArray, effective_scale, qtype_of
from quant_numerics.array.tiles import split_axes
from quant_numerics.formats.encoding import decode
from quant_numerics.formats.qtypes import compute_dtype, float_dtype, promote_floats

INT32_MAX = 2**31 - 1
_MIXED = {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)}
"""Dtypes that a contraction multiplies as they are: those of FP8 training, where activations and
weights have more digits than gradients. XLA passes both to cuBLASLt."""
_LEAST_CHUNK = 64
"""Integer sums of fewer terms than this are not worth the rescaling of each."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtypes in which two operands are multiplied and summed.

    At least one operand is a QArray.

    Attributes:
      dtype: dtype that the numbers of both sides are converted to.
      sums: dtype of the sums, int32 or a float.
      precision: the ``precision`` of the op of ``lax``.
      limit: how many products an int32 sum may have; None for float sums.
      own: the dtypes of lhs and rhs where a contraction can take two; None where it takes `dtype`.
    """

    dtype: np.dtype
    sums: np.dtype
    precision: Any
    limit: int | None = None
    own: tuple[np.dtype, np.dtype] | None = None

    @property
    def sides(self) -> tuple[np.dtype, np.dtype]:
        """Return the dtypes in which ``lax.dot_general`` gets lhs and rhs."""
        return self.own or (self.dtype, self.dtype)


def arithmetic(lhs: QArray | jax.Array, rhs: QArray | jax.Array, precision: Any) -> Arithmetic:
    """Return how to multiply `lhs` and `rhs`, at least one a QArray."""
    quantized = [x for x in (lhs, rhs) if isinstance(x, QArray)]
    floats = [x.dtype for x in (lhs, rhs) if not isinstance(x, QArray)]
    kinds = [qtype_of(q) for q in quantized]
    float32 = jnp.dtype(jnp.float32)
    # int16 and codebooks have more digits than the 16-bit floats.
    fine = any(k.bits > 8 or k.kind == "codebook" for k in kinds)
    if floats:
        if fine and floats[0] != compute_dtype(floats[0]):
            return Arithmetic(float32, float32, precision or lax.Precision.HIGHEST)
        return Arithmetic(floats[0], compute_dtype(floats[0]), precision)
    if all(k.kind == "int" for k in kinds):
        limit = INT32_MAX // (largest_number(quantized[0]) * largest_number(quantized[1]))
        if not fine:
            return Arithmetic(jnp.dtype(jnp.int8), jnp.dtype(jnp.int32), None, limit)
        if limit >= _LEAST_CHUNK:
            return Arithmetic(jnp.dtype(jnp.int32), jnp.dtype(jnp.int32), None, limit)
    if fine:
        return Arithmetic(float32, float32, lax.Precision.HIGHEST)
    left, right = (k.storage_dtype for k in kinds)
    if left == right and kinds[0].kind == "float" and kinds[0].bits == 8:
        return Arithmetic(left, float32, None)
    if {left, right} == _MIXED:
        return Arithmetic(float32, float32, None, own=(left, right))
    # Up to 9 binary digits, which matrix units keep at the default precision. Not bfloat16: XLA's
    # CPU backend can't sum all products of that in float32.
    return Arithmetic(float32, float32, None)


def largest_number(q: QArray) -> int:
    """Return the largest magnitude of a quantized value less the zero point."""
    kind = qtype_of(q)
    if q.zero_point is None:
        # quantize keeps to qmax; other people's files use the whole range.
        return int(kind.qmax) if kind.asymmetric is None else -kind.asymmetric[0]
    assert kind.asymmetric is not None
    return kind.asymmetric[1] - kind.asymmetric[0]


def has_zero_point_left(q: QArray, dtype: np.dtype) -> bool:
    """Return whether ``numbers(q, dtype)`` leaves the zero point to be subtracted."""
    return q.zero_point is not None and dtype == jnp.int8 and largest_number(q) > 127


def numbers(q: QArray, dtype: np.dtype) -> jax.Array:
    """Return the numbers that quantized values stand for, less zero points, exactly.

    The difference of int8 values and zero points does not fit in int8: there the zero
    point is left to the caller, as ``has_zero_point_left`` tells.
    """
    values = decode(q.qvalue, qtype_of(q), dtype)
    if q.zero_point is None or has_zero_point_left(q, dtype):
        return values
    cut = q.slices
    return cut.join(cut.split(values) - cut.split(q.zero_point.astype(dtype)))


def output_dtype(lhs: QArray | jax.Array, rhs: QArray | jax.Array, preferred: Any) -> np.dtype:
    """Return the dtype of an op's result."""
    if preferred is not None:
        return float_dtype(preferred, "preferred_element_type")
    return promote_floats(lhs.dtype, rhs.dtype)


def prepared(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, precision: Any, preferred: Any
) -> tuple[np.dtype, Arithmetic, jax.Array, jax.Array]:
    """Return the result's dtype, how to multiply, and the numbers of both sides.

    These are less their zero points, for ops that can't subtract them after the sum, as a dot does:
    padding has none, and rows of no group have none.
    """
    dtype = output_dtype(lhs, rhs, preferred)
    sides = lhs, rhs
    if any(isinstance(x, QArray) for x in sides):
        how = arithmetic(lhs, rhs, precision)
        if any(isinstance(x, QArray) and has_zero_point_left(x, how.dtype) for x in sides):
            how = dataclasses.replace(how, dtype=jnp.dtype(jnp.int32))
    else:
        # lax refuses to accumulate in less than the operands' precision.
        common = promote_floats(lhs.dtype, rhs.dtype)
        how = Arithmetic(common, promote_floats(common, dtype), precision)
    left, right = (numbers(x, how.dtype) if isinstance(x, QArray) else x.astype(how.dtype)
                   for x in sides)  # fmt: skip
    return dtype, how, left, right


@dataclasses.dataclass(frozen=True)
class Side:
    """An operand with its tiled contracting axes split.

    Axis numbers are those of `values`.

    `scale` and `zero_point` (None: none, or none left) have the elements of an array with axes
    (batch, tiles, free), whose shape is `scale_shape`, in the same order.
    """

    values: jax.Array
    scale: jax.Array | None
    zero_point: jax.Array | None
    scale_shape: tuple[int, ...]
    batch: tuple[int, ...]
    tiles: tuple[int, ...]
    contract: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def scale_is_tiled(self) -> bool:
        """Return whether scales differ along the contraction."""
        n = len(self.batch)
        return any(s > 1 for s in self.scale_shape[n : n + len(self.tiles)])


def contracted_tiles(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, lc: Sequence[int], rc: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Return the tile size of each tiled pair of contracting axes."""
    tiles = {}
    for a, b in zip(lc, rc, strict=True):
        found = {tile for tile in (_tile(lhs, a), _tile(rhs, b)) if tile is not None}
        if len(found) > 1:
            raise ValueError(
                f"lhs axis {a} and rhs axis {b}, which are contracted, must have tiles of one "
                f"size, got {_tile(lhs, a)} and {_tile(rhs, b)}. Give both sides one tile size, or "
                "one of them a single scale along this axis."
            )
        if found:
            tiles[a, b] = found.pop()
    return tiles


def _tile(x: QArray | jax.Array, axis: int) -> int | None:
    """Return the elements of an axis that share a scale; None: all."""
    if not isinstance(x, QArray) or x.scale.shape[axis] == 1:
        return None
    return x.slices.tiles.get(axis, 1)


def evenly_tiled(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, tiles: Mapping[tuple[int, int], int]
) -> list[tuple[Any, Any]]:
    """Return parts with even tiles, whose contractions sum up to the whole."""
    for (a, b), tile in tiles.items():
        size = lhs.shape[a]
        if size % tile and size > tile:
            # The shorter tile is contracted alone: padded, the whole side would be copied.
            bounds = (0, size - size % tile), (size - size % tile, size)
            parts = [(part_of(lhs, a, *bound), part_of(rhs, b, *bound)) for bound in bounds]
            return [pair for left, right in parts for pair in evenly_tiled(left, right, tiles)]
    return [(lhs, rhs)]


def part_of(x: Any, axis: int, start: int, limit: int) -> Any:
    """Return a slice of a side along an axis."""
    if not isinstance(x, QArray):
        return lax.slice_in_dim(x, start, limit, axis=axis)
    return x[(slice(None),) * axis + (slice(start, limit),)]


def side_of(
    x: QArray | jax.Array,
    dtype: np.dtype,
    contract: Sequence[int],
    batch: Sequence[int],
    tiles: Mapping[int, int],
) -> Side:
    """Return an operand as a ``Side``, with numbers in `dtype` and tiles by contracted axis."""
    values = numbers(x, dtype) if isinstance(x, QArray) else x.astype(dtype)
    values, where = split_axes(values, tiles)
    free = [a for a in range(x.ndim) if a not in contract and a not in batch]
    tiled = [a for a in contract if a in tiles]
    scale = zero_point = None
    scale_shape: tuple[int, ...] = ()
    if isinstance(x, QArray):
        order = [*batch, *tiled, *free]
        # Tiles along a free or batch axis: one scale per index.
        cut, others = x.slices, [*batch, *free]
        scale = cut.repeated(effective_scale(x), others)
        scale_shape = tuple(scale.shape[a] for a in order)
        scale = _arrange(scale, order)
        if has_zero_point_left(x, dtype):
            assert x.zero_point is not None
            zero_point = _arrange(cut.repeated(x.zero_point.astype(jnp.int32), others), order)
    return Side(
        values,
        scale,
        zero_point,
        scale_shape,
        batch=tuple(where[a] for a in batch),
        tiles=tuple(where[a] - 1 for a in tiled),
        contract=tuple(where[a] for a in contract),
        free=tuple(where[a] for a in free),
    )


def _arrange(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Return `x` with its elements in the order of some axes.

    Others have size 1.
    """
    long = [a for a in order if x.shape[a] != 1]
    if long == sorted(long):
        return x  # a reshape is enough, and is left to the caller
    return x.transpose(*order, *(a for a in range(x.ndim) if a not in order))


def value_sums(side: Side, lhs: Side, rhs: Side) -> jax.Array:
    """Return sums of quantized values over contracting axes, in the output's layout."""
    sums = side.values.astype(jnp.int32).sum(axis=side.contract, keepdims=True, dtype=jnp.int32)
    order = (*side.batch, *side.tiles, *side.free)
    shape = in_output(tuple(sums.shape[a] for a in order), side, lhs, rhs)
    return _arrange(sums, order).reshape(shape)


def chunked(side: Side, chunks: int, size: int) -> Side:
    """Return a side with its contraction in chunks, zero-padded.

    The chunks are one more tiled axis.
    """
    n, free = len(side.batch) + len(side.tiles), len(side.free)
    outer = side.batch + side.tiles + side.free
    values = side.values.transpose(*outer, *side.contract)
    shape = values.shape[: len(outer)]
    length = math.prod(values.shape[len(outer) :])
    padding = [(0, 0)] * len(outer) + [(0, size * chunks - length)]
    return Side(
        jnp.pad(values.reshape(*shape, length), padding).reshape(*shape, chunks, size),
        None,
        side.zero_point,
        (*side.scale_shape[:n], 1, *side.scale_shape[n:]),
        batch=tuple(range(len(side.batch))),
        tiles=(*range(len(side.batch), n), n + free),
        contract=(n + free + 1,),
        free=tuple(range(n, n + free)),
    )


def in_output(shape: tuple[int, ...], side: Side, lhs: Side, rhs: Side) -> tuple[int, ...]:
    """Return a side's (batch, tiles, free) shape with the output's axes."""
    outer = len(side.batch) + len(side.tiles)
    if side is lhs:
        return shape + (1,) * len(rhs.free)
    return shape[:outer] + (1,) * len(lhs.free) + shape[outer:]
