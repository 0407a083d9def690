"""Quantized dot_general: integer accumulation and float rescaling.

Two operands in one block format are multiplied as they are, where a platform does that. GPUs from
Blackwell on take blocks with their scales into the matrix units: XLA's ``block_scaled_dot``, which
is ``jax.nn.scaled_matmul``. Older ones dequantize for one matmul, which is still faster than sums
of each block, since these are larger than the operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from quant_numerics._compat import primitive
from quant_numerics.array.explicit import sharded_as
from quant_numerics.array.qarray import Operand, QArray, as_operand, dequantize, qtype_of
from quant_numerics.autodiff.linear import on_platforms
from quant_numerics.formats.qtypes import compute_dtype, promote_floats
from quant_numerics.ops.arithmetic import (
    Arithmetic,
    Side,
    arithmetic,
    chunked,
    contracted_tiles,
    evenly_tiled,
    in_output,
    output_dtype,
    side_of,
    value_sums,
)
from quant_numerics.ops.cpu_dot import dot_in_kernel, int_dot_general

FORMATS = ("mxfp8", "nvfp4")
"""Those that both operands may have: cuDNN has matmuls of them."""
_PLATFORMS = ("cuda", "rocm")


def block_dot(
    plain: Callable[[QArray, QArray], jax.Array],
    lhs: QArray,
    rhs: QArray,
    dimension_numbers: Any,
) -> jax.Array:
    """Contract to float32 (batch, lhs free, rhs free) like `plain`, which other platforms run."""
    leaves, tree = jax.tree.flatten((lhs, rhs))

    def other(*leaves: jax.Array) -> jax.Array:
        return plain(*jax.tree.unflatten(tree, leaves))

    def native(*leaves: jax.Array) -> jax.Array:
        left, right = jax.tree.unflatten(tree, leaves)
        return _native(left, right, dimension_numbers)

    return on_platforms(other, *leaves, **dict.fromkeys(_PLATFORMS, native))


def is_block_dot(lhs: Any, rhs: Any, dimension_numbers: Any) -> bool:
    """Return whether both operands have one format and blocks along the whole contraction."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return False
    (lc, rc), _ = dimension_numbers
    sizes = (*lhs.shape, *rhs.shape)
    return (
        lhs.qtype == rhs.qtype
        and lhs.qtype in FORMATS
        and all(isinstance(size, int) and size > 0 for size in sizes)
        and _has_blocks(lhs, lc)
        and _has_blocks(rhs, rc)
        # The program of one device has no partitions for custom calls.
        and not jax.sharding.get_abstract_mesh().manual_axes
    )


def _has_blocks(q: QArray, contract: Sequence[int]) -> bool:
    """Return whether scales are those of consecutive blocks of the contracted axes, in order."""
    block = qtype_of(q).block or 1
    shape, scales = (tuple(x.shape[a] for a in contract) for x in (q, q.scale))
    if q.ragged_tiles or not contract or math.prod(shape) != block * math.prod(scales):
        return False
    if any(q.scale.shape[a] not in (1, n) for a, n in enumerate(q.shape) if a not in contract):
        return False
    if q.global_scale is not None and any(q.global_scale.shape[a] != 1 for a in contract):
        return False
    # Axes with a scale per index, one that is cut, and axes that lie within a block.
    within = False
    for size, count in zip(shape, scales, strict=True):
        if within and count != 1:
            return False
        within = within or count != size
    return True


def _native(lhs: QArray, rhs: QArray, dimension_numbers: Any) -> jax.Array:
    contract, batch = dimension_numbers
    shape = [lhs.shape[a] for a in batch[0]]
    sides, factors = [], []
    for q, summed, mapped in zip((lhs, rhs), contract, batch, strict=True):
        free = [a for a in range(q.ndim) if a not in (*summed, *mapped)]
        shape += [q.shape[a] for a in free]
        order = (*mapped, *free, *summed)
        sizes = [math.prod(q.shape[a] for a in axes) for axes in (mapped, free)]
        kept = [n if a not in summed else s for a, (n, s) in
                enumerate(zip(q.shape, q.scale.shape, strict=True))]  # fmt: skip
        scale = jnp.broadcast_to(q.scale, kept)
        sides.append([lax.transpose(x, order).reshape(*sizes, -1) for x in (q.qvalue, scale)])
        if q.global_scale is not None:
            # Rows that were looked up, or mapped, have one each.
            kept = [1 if a in summed else n for a, n in enumerate(q.shape)]
            wide = lax.transpose(jnp.broadcast_to(q.global_scale, kept), order).reshape(sizes)
            factors.append(jnp.expand_dims(wide, 2 if q is lhs else 1))
    (left, left_scale), (right, right_scale) = sides
    out = scaled_matmul_p.bind(left, right, left_scale, right_scale)
    return math.prod(factors, start=out).reshape(shape)


def _result(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
    return jax.core.ShapedArray((*lhs.shape[:2], rhs.shape[1]), jnp.dtype(jnp.float32))


def _dequantized(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    """Multiply in float32, which holds the numbers of both sides exactly."""

    def floats(x: jax.Array, scale: jax.Array) -> jax.Array:
        blocks = x.astype(np.float32).reshape(*scale.shape, -1)
        return (blocks * scale.astype(np.float32)[..., None]).reshape(x.shape)

    dims = (((2,), (2,)), ((0,), (0,)))
    return lax.dot_general(floats(lhs, lhs_scale), floats(rhs, rhs_scale), dims)


def _batched(operands: Sequence[jax.Array], dims: Sequence[Any]) -> tuple[jax.Array, int]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    mapped = [dims[i] is not None or dims[i + 2] is not None for i in (0, 1)]
    # With one side fixed, examples are more rows of the other. Otherwise they are a batch.
    axis = 0 if all(mapped) else 1

    def merged(x: jax.Array, dim: Any, is_mapped: bool) -> jax.Array:
        if not is_mapped:
            return x
        if dim is None:
            x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
        x = jnp.moveaxis(x, dim, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    out = scaled_matmul_p.bind(*map(merged, operands, dims, mapped * 2))
    axis = axis if mapped[0] else 2
    return out.reshape(*out.shape[:axis], size, -1, *out.shape[axis + 1 :]), axis


# A primitive of our own: JAX's can't be exported, be lowered for several platforms, or be mapped
# with one operand fixed (before 0.11).
scaled_matmul_p = primitive(
    "quant_numerics.scaled_matmul",
    _result,
    _dequantized,
    jax.nn.scaled_matmul,
    _PLATFORMS,
    _batched,
)


DotDimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]
_ROWS_OF_A_TILE = 4
"""On CPU, sums by tile cost as much as dequantizing if tiles have this many elements per row."""


def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Contract like ``jax.lax.dot_general``; either side may be a QArray.

    - Two integer QArrays: quantized values are multiplied as int8 and summed in int32 by
      ``lax.dot_general``, then rescaled in float32: times the lhs scale, then times the rhs scale
      (section 2.2 of Jacob et al. 2018, arXiv:1712.05877). Zero points are subtracted exactly, by
      the sums of quantized values (section 2.3). With int16, they are multiplied as int32; two
      int16 sides are multiplied and summed in float32.
    - Other two QArrays: multiplied as they are if both have one float8 dtype, else in float32. Sums
      are float32.
    - One QArray ("weight-only"): its numbers are converted to the dtype of the float side, which
      holds them exactly (for nf4 and int16 with a 16-bit float side, both are converted to
      float32), the sum is in float32, then it is rescaled. One that is tiled along the contraction
      is dequantized instead, in the wider of the two dtypes, where the float side has at least a
      quarter as many rows as a tile has elements: the sums of all tiles would be larger than the
      QArray.
    - No QArray: plain ``lax.dot_general`` in the wider of the two dtypes.

    Scales may differ along batch and free axes freely, and along contracting axes by tile: each
    tile is contracted alone, rescaled and then summed in float32. Where one side is tiled the
    other may have one scale along that axis (it is multiplied in after the sum) or equal tiles.
    float64 replaces float32 in weight-only dots with a float64 side (under x64).

    int32 never overflows: contractions longer than ``(2**31 - 1) // (max_lhs * max_rhs)``, with
    the largest magnitudes that the sides' numbers can have (131071 for int8 by int8), are done in
    chunks that are summed in float32.

    An output element is non-finite where a slice that it is computed from has a non-finite value.
    With one scale per row and column that is where the float op's output is non-finite.

    Args:
      lhs: QArray, PackedQArray, or array of bfloat16, float16, float32 or float64.
      rhs: the same.
      dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
      precision: passed to ``lax.dot_general`` where a side is float; others are exact.
      preferred_element_type: dtype of the output, a supported float dtype; by default the wider
        of the logical dtypes (float32 for bfloat16 with float16).
      out_sharding: sharding of the output, a NamedSharding or PartitionSpec, as in ``lax``.

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
    if any(axis < 0 for axis in (*lc, *rc, *lb, *rb)):
        _output_shape(lhs, rhs, dims)  # lax raises: it takes no negative axes
    dtype = output_dtype(lhs, rhs, preferred_element_type)
    if 0 in lhs.shape and any(lhs.shape[a] == 0 for a in dims[0][0]):
        return jnp.zeros(_output_shape(lhs, rhs, dims), dtype, device=out_sharding)
    if not isinstance(lhs, QArray) and not isinstance(rhs, QArray):
        common = promote_floats(lhs.dtype, rhs.dtype)
        return lax.dot_general(
            lhs.astype(common),
            rhs.astype(common),
            dims,
            precision=precision,
            preferred_element_type=promote_floats(common, dtype),
            out_sharding=out_sharding,
        ).astype(dtype)
    how = arithmetic(lhs, rhs, precision)

    def run(lhs: Any, rhs: Any, out_sharding: Any) -> jax.Array:
        if out_sharding is None and is_block_dot(lhs, rhs, dims):
            plain = functools.partial(in_parts, out_sharding=None)
            return block_dot(plain, lhs, rhs, dims).astype(dtype)
        return in_parts(lhs, rhs, out_sharding).astype(dtype)

    def in_parts(lhs: Any, rhs: Any, out_sharding: Any) -> jax.Array:
        tiles = contracted_tiles(lhs, rhs, *dims[0])
        if _has_many_rows(lhs, rhs, dims, tiles):
            return _dequantized_dot(lhs, rhs, dims, how, out_sharding)
        parts = evenly_tiled(lhs, rhs, tiles)
        sums = [_scaled_dot(left, right, dims, how, out_sharding) for left, right in parts]
        return functools.reduce(lax.add, sums)

    try:
        reference = functools.partial(lax.dot_general, dimension_numbers=dims)
        return sharded_as(run, reference, (lhs, rhs), out_sharding)
    except (TypeError, ValueError, IndexError):
        # If shapes or dimension numbers are wrong, lax raises here in the caller's terms.
        _output_shape(lhs, rhs, dims)
        raise


def _has_many_rows(
    lhs: QArray | jax.Array,
    rhs: QArray | jax.Array,
    dims: DotDimensionNumbers,
    tiles: Mapping[tuple[int, int], int],
) -> bool:
    """Return whether the tiles' sums would be larger than the dequantized side."""
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        return False
    side = int(isinstance(lhs, QArray))  # the float one
    x, summed = (lhs, rhs)[side], {*dims[0][side], *dims[1][side]}
    rows = [size for axis, size in enumerate(x.shape) if axis not in summed]
    if not all(isinstance(size, int) for size in rows):
        return bool(tiles)  # a symbolic size, which may be large
    # Measured on CPU with tiles of 32 and 128. A sum is written and read a few times.
    return any(_ROWS_OF_A_TILE * math.prod(rows) >= tile for tile in tiles.values())


def _dequantized_dot(
    lhs: QArray | jax.Array,
    rhs: QArray | jax.Array,
    dims: DotDimensionNumbers,
    how: Arithmetic,
    out_sharding: Any,
) -> jax.Array:
    dtype = functools.reduce(promote_floats, (lhs.dtype, rhs.dtype), how.dtype)

    def floats(x: QArray | jax.Array) -> jax.Array:
        return dequantize(x.astype(dtype)) if isinstance(x, QArray) else x.astype(dtype)

    return lax.dot_general(
        floats(lhs),
        floats(rhs),
        dims,
        precision=how.precision,
        preferred_element_type=compute_dtype(dtype),
        out_sharding=out_sharding,
    )


def _output_shape(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, dims: DotDimensionNumbers
) -> tuple[int, ...]:
    structs = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs)]
    return jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), *structs).shape


def _scaled_dot(
    lhs: QArray | jax.Array,
    rhs: QArray | jax.Array,
    dims: DotDimensionNumbers,
    how: Arithmetic,
    out_sharding: Any,
) -> jax.Array:
    """Contract in the compute dtype; at least one side is a QArray."""
    (lc, rc), (lb, rb) = dims
    tiles = contracted_tiles(lhs, rhs, lc, rc)
    left, right = how.sides
    side_l = side_of(lhs, left, lc, lb, {a: t for (a, _), t in tiles.items()})
    side_r = side_of(rhs, right, rc, rb, {a: t for (_, a), t in tiles.items()})
    length = math.prod(side_l.values.shape[a] for a in side_l.contract)
    n = len(side_l.batch) + len(side_l.tiles)
    if how.limit is None or length <= how.limit:
        sharding = _with_axes(out_sharding, len(lb), len(tiles))

        def plain(lhs: Side, rhs: Side) -> jax.Array:
            return _rescale(_dot(lhs, rhs, how, length, sharding), lhs, rhs)

        found = None
        if how.limit is not None and sharding is None:
            found = dot_in_kernel(side_l, side_r, plain)
        return plain(side_l, side_r) if found is None else found
    chunks = -(-length // how.limit)
    size = -(-length // chunks)
    terms = np.minimum(size, length - size * np.arange(chunks)).astype(np.int32)
    terms = terms.reshape([1] * n + [chunks] + [1] * (len(side_l.free) + len(side_r.free)))
    sharding = _with_axes(out_sharding, len(lb), len(tiles) + 1)
    left, right = chunked(side_l, chunks, size), chunked(side_r, chunks, size)
    # In float32 before rescaling: a chunk that sums to zero must not turn an infinite scale into
    # NaN.
    acc = _dot(left, right, how, terms, sharding).sum(axis=n)
    return _rescale(acc, side_l, side_r)


def _dot(
    lhs: Side, rhs: Side, how: Arithmetic, terms: int | np.ndarray, out_sharding: Any
) -> jax.Array:
    """Return sums less zero points, as floats (batch, tiles, lhs free, rhs free)."""
    dims = (lhs.contract, rhs.contract), (lhs.batch + lhs.tiles, rhs.batch + rhs.tiles)
    if how.limit is None:
        return lax.dot_general(
            lhs.values,
            rhs.values,
            dims,
            precision=how.precision,
            preferred_element_type=how.sums,
            out_sharding=out_sharding,
        )
    acc = int_dot_general(lhs.values, rhs.values, dims, out_sharding)
    # sum((a - z) * (b - w)) = sum(a * b) - z * sum(b) - w * sum(a) + terms * z * w. Parts of it
    # may pass the ends of int32, but the whole does not, and int32 wraps around.
    left, right = lhs.zero_point, rhs.zero_point
    if left is not None:
        left = left.reshape(in_output(lhs.scale_shape, lhs, lhs, rhs))
        acc = acc - left * value_sums(rhs, lhs, rhs)
    if right is not None:
        right = right.reshape(in_output(rhs.scale_shape, rhs, lhs, rhs))
        acc = acc - right * value_sums(lhs, lhs, rhs)
    if left is not None and right is not None:
        acc = acc + left * right * terms
    return acc.astype(jnp.float32)


def _rescale(acc: jax.Array, lhs: Side, rhs: Side) -> jax.Array:
    """Rescale the sums of ``_dot``, and add those of tiles."""
    n, tiles = len(lhs.batch), len(lhs.tiles)
    sides = [(side, side.scale) for side in (lhs, rhs) if side.scale is not None]
    for side, scale in sides:
        if side.scale_is_tiled:
            shape = in_output(side.scale_shape, side, lhs, rhs)
            acc = acc * scale.astype(acc.dtype).reshape(shape)
    if tiles:
        acc = acc.sum(axis=tuple(range(n, n + tiles)))
    # After the sum: cheaper, and a tile that sums to zero cannot turn an infinite scale into NaN.
    for side, scale in sides:
        if not side.scale_is_tiled:
            shape = in_output(side.scale_shape, side, lhs, rhs)
            acc = acc * scale.astype(acc.dtype).reshape(shape[:n] + shape[n + tiles :])
    return acc


def _with_axes(sharding: Any, position: int, count: int) -> Any:
    """Return the sharding with more, unsharded axes at a position."""
    if sharding is None or count == 0:
        return sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    parts = tuple(spec) + (None,) * position
    spec = PartitionSpec(*parts[:position], *(None,) * count, *spec[position:])
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec
