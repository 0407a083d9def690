"""Quantized ragged contractions: rows in groups, each group with one matrix."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.explicit import sharded_as
from quant_numerics.array.qarray import Operand, QArray, as_operand, dequantize, effective_scale
from quant_numerics.array.tiles import placed
from quant_numerics.formats.qtypes import compute_dtype
from quant_numerics.ops.arithmetic import Arithmetic, contracted_tiles, prepared
from quant_numerics.ops.take import take

MOST_PIECES = 32
"""More tiles than this are not multiplied one by one."""


class Piece(NamedTuple):
    """Elements of a contracted axis, from `start` to before `limit`, with the scale of one tile."""

    axes: tuple[int, int]
    start: int
    limit: int
    tile: int

    def of(self, x: jax.Array, side: int) -> jax.Array:
        """Return the part of an operand's elements."""
        return lax.slice_in_dim(x, self.start, self.limit, axis=self.axes[side])


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the operands' axes are in the output.

    Attributes:
      contract: the contracted axes of both sides.
      outputs: for each side, the axis of the output that each of its axes is.
      ragged: the lhs axis that is in groups.
      group: the rhs axis of groups, or None.
    """

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    outputs: tuple[Mapping[int, int], Mapping[int, int]]
    ragged: int
    group: int | None

    @classmethod
    def of(cls, lhs: Any, rhs: Any, given: lax.RaggedDotDimensionNumbers) -> Layout:
        """Return the layout that dimension numbers ask for."""
        (lc, rc), (lb, rb) = given.dot_dimension_numbers
        (ragged,) = given.lhs_ragged_dimensions
        groups = tuple(given.rhs_group_dimensions)
        # A ragged contraction gives one result per group, along a new leading axis.
        position = int(ragged in tuple(lc))
        left = {a: position + i for i, a in enumerate(lb)}
        right = {a: position + i for i, a in enumerate(rb)}
        position += len(lb)
        for axes, ndim, skip in ((left, lhs.ndim, lc), (right, rhs.ndim, (*rc, *groups))):
            for axis in range(ndim):
                if axis not in axes and axis not in skip:
                    axes[axis] = position
                    position += 1
        group = groups[0] if groups else None
        if group is not None:
            right[group] = left[ragged]  # once it is expanded to rows
        return cls((tuple(lc), tuple(rc)), (left, right), ragged, group)

    def pieces(
        self, lhs: QArray | jax.Array, rhs: QArray | jax.Array, how: Arithmetic
    ) -> Sequence[Piece | None]:
        """Return the parts of a contraction, by tiles or against overflow; None is the whole."""
        tiles = contracted_tiles(lhs, rhs, *self.contract)
        if len(tiles) > 1 or any(a == self.ragged for a, _ in tiles):
            raise ValueError(
                "tiles of a ragged dot must be along one contracted axis that is not ragged, got "
                f"{tiles} ((lhs axis, rhs axis): size). Choose other tiles."
            )
        size = math.prod(lhs.shape[a] for a in self.contract[0])
        axes = (self.contract[0][0], self.contract[1][0])
        if not tiles:
            if how.limit is None or size <= how.limit:
                return [None]
            length = lhs.shape[axes[0]]
            step = max(how.limit // (size // length), 1)
            if axes[0] == self.ragged:
                # It can't be cut: so many pieces mean that both sides are dequantized.
                return [None] * (MOST_PIECES + 1)
            return [Piece(axes, i, min(i + step, length), 0) for i in range(0, length, step)]
        ((axes, tile),) = tiles.items()
        length = lhs.shape[axes[0]]
        cuts = 1 if how.limit is None else -(-size // length * tile // how.limit)
        step = -(-tile // cuts)
        return [
            Piece(axes, start, min(start + step, end, length), i)
            for i, end in enumerate(range(tile, length + tile, tile))
            for start in range(end - tile, min(end, length), step)
        ]

    def scale(
        self, q: QArray, side: int, piece: Piece | None, rows: jax.Array | None, like: jax.Array
    ) -> jax.Array:
        """Return the scales of a piece with the axes of the output.

        With `rows`, the group of each, those of groups are repeated for their rows.
        """
        kept = [axis for axis in range(q.ndim) if axis not in self.contract[side]]
        scale = q.slices.repeated(effective_scale(q), kept)
        if piece is not None and scale.shape[axis := piece.axes[side]] != 1:
            scale = lax.slice_in_dim(scale, piece.tile, piece.tile + 1, axis=axis)
        scale = scale.astype(like.dtype)
        if side and rows is not None and self.group is not None:
            at = (slice(None),) * self.group + (rows,)
            scale = scale.at[at].get(mode="promise_in_bounds")
        # A group axis that was not expanded has size 1, and the ragged one is the other side's.
        return placed(scale, self.outputs[side], like.ndim)


RAGGED_DOT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
"""The dimension numbers of ``ragged_dot``."""


def ragged_dot(
    lhs: Operand,
    rhs: Operand,
    group_sizes: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Any = None,
) -> jax.Array:
    """Multiply like ``jax.lax.ragged_dot``; either side may be a QArray.

    As ``ragged_dot_general`` with the rows of `lhs` in groups: the first ``group_sizes[0]`` rows
    are multiplied by ``rhs[0]``, the next by ``rhs[1]`` and so on. Rows of no group give zeros.

    Args:
      lhs: of shape (m, k); QArray, PackedQArray or float array. One scale, or one per row, each
        also per tile of k.
      rhs: of shape (g, k, n), the same. One scale, or one per group, per column (or tile of
        columns), or both, each also per tile of k.
      group_sizes: integers of shape (g,), or of more groups with a `group_offset`.
      precision: as in ``dot_general``.
      preferred_element_type: as in ``dot_general``.
      group_offset: integer of shape () or (1,): the group that ``rhs[0]`` belongs to, if `rhs` has
        the matrices of some consecutive groups only. Rows of other groups give zeros.

    Returns:
      Array of shape (m, n).

    Raises:
      ValueError: a `group_offset` that is not one number, or fewer groups than matrices.
    """
    start = None
    if group_offset is not None:
        lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
        start, group_sizes = window(jnp.asarray(group_sizes), group_offset, rhs.shape[0])
        # lax begins with the first row: the rows before the first group go behind all others.
        order = lax.rem(lax.iota(jnp.int32, lhs.shape[0]) + start, jnp.int32(max(lhs.shape[0], 1)))
        lhs = take(lhs, order, 0, mode="clip", dequantize=False)
    out = ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        RAGGED_DOT,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return out if start is None else jnp.roll(out, start, 0)


def window(group_sizes: jax.Array, offset: Any, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the first row and the sizes of some groups, int32.

    These are the `count` groups from `offset` on.
    """
    offset = jnp.asarray(offset)
    if offset.size != 1 or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ValueError(
            f"group_offset must be one integer, got {offset.dtype} of shape {offset.shape}. Give "
            "the number of the group that rhs[0] belongs to."
        )
    if group_sizes.ndim != 1 or group_sizes.shape[0] < count:
        raise ValueError(
            f"group_sizes must have one axis of at least {count} groups, as rhs has matrices, got "
            f"shape {group_sizes.shape}. Give the sizes of all groups with a group_offset."
        )
    offset, sizes = offset.reshape(()).astype(jnp.int32), group_sizes.astype(jnp.int32)
    before = lax.iota(jnp.int32, sizes.shape[0]) < offset
    start = jnp.sum(jnp.where(before, sizes, 0), dtype=jnp.int32)
    # Padded, since a slice that passes the end would begin earlier.
    return start, lax.dynamic_slice_in_dim(jnp.pad(sizes, (0, count)), offset, count)


def ragged_dot_general(
    lhs: Operand,
    rhs: Operand,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Any = None,
) -> jax.Array:
    """Contract like ``jax.lax.ragged_dot_general``; either side may be a QArray.

    The dtypes are those of ``dot_general``: two integer sides are multiplied as int8 and summed in
    int32 (multiplied as int32 with int16, and where an int8 side has zero points), then rescaled in
    float32, times the lhs scale, then times the rhs scale.

    Scales may differ along batch and free axes (by index or by tile) and along groups, and along
    one contracting axis by tile. Each tile is contracted alone; with more than 32 tiles,
    and where int32 could overflow in more than 32 parts, both sides are dequantized to float32
    instead. A ragged contracting axis can have no tiles.

    Derivatives are those of ``lax.ragged_dot_general``, with respect to float sides and to scales.

    Args:
      lhs: QArray, PackedQArray, or array of bfloat16, float16, float32 or float64.
      rhs: the same.
      group_sizes: integers; of one axis where scales differ between groups.
      ragged_dot_dimension_numbers: as in ``lax``.
      precision: as in ``dot_general``.
      preferred_element_type: as in ``dot_general``.
      group_offset: None; JAX has it for its kernels only.

    Raises:
      TypeError: a side that is neither a QArray nor a supported float array; what ``lax`` refuses.
      ValueError: tiles that differ between the sides, or along an axis that can have none.
      NotImplementedError: a `group_offset`.
    """
    if group_offset is not None:
        raise NotImplementedError(
            "group_offset of ragged_dot_general must be None, as in jax.lax, got "
            f"{group_offset!r}. Use ragged_dot with a group_offset, or slice the rows and "
            "matrices of the groups."
        )
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    dims = ragged_dot_dimension_numbers

    def reference(lhs: Any, rhs: Any, sizes: Any, out_sharding: None) -> jax.Array:
        return lax.ragged_dot_general(lhs, rhs, sizes, dims)

    run = functools.partial(_ragged_dot, dims, precision, preferred_element_type)
    return sharded_as(run, reference, (lhs, rhs, jnp.asarray(group_sizes)))


def _ragged_dot(
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any,
    preferred_element_type: DTypeLike | None,
    lhs: QArray | jax.Array,
    rhs: QArray | jax.Array,
    group_sizes: jax.Array,
    out_sharding: None = None,
) -> jax.Array:
    dims = ragged_dot_dimension_numbers
    dtype, how, left, right = prepared(lhs, rhs, precision, preferred_element_type)

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        options = {"precision": how.precision, "preferred_element_type": how.sums}
        return lax.ragged_dot_general(left, right, group_sizes, dims, **options)

    if not isinstance(lhs, QArray) and not isinstance(rhs, QArray):
        return product(left, right).astype(dtype)
    layout = Layout.of(lhs, rhs, dims)
    pieces = layout.pieces(lhs, rhs, how)
    if len(pieces) > MOST_PIECES:
        left, right = (
            dequantize(x).astype(compute_dtype(x.dtype)) if isinstance(x, QArray) else x
            for x in (lhs, rhs)
        )
        precision = lax.Precision.HIGHEST if precision is None else precision
        return _ragged_dot(dims, precision, dtype, left, right, group_sizes)
    rows = None
    if layout.group is not None and isinstance(rhs, QArray) and rhs.scale.shape[layout.group] > 1:
        rows = group_of_rows(group_sizes, lhs.shape[layout.ragged])

    total = None
    for piece in pieces:
        acc = product(*(x if piece is None else piece.of(x, side)
                        for side, x in enumerate((left, right))))  # fmt: skip
        acc = acc.astype(compute_dtype(acc.dtype) if how.limit is None else jnp.float32)
        for side, x in enumerate((lhs, rhs)):
            if isinstance(x, QArray):
                acc = acc * layout.scale(x, side, piece, rows, acc)
        total = acc if total is None else total + acc
    assert total is not None
    if layout.group is not None:
        # A row of no group is zero, whatever its scale is: padding may be infinite or NaN.
        place = layout.outputs[0][layout.ragged]
        inside = in_groups(group_sizes, lhs.shape[layout.ragged])
        before, after = place + 1 - inside.ndim, total.ndim - place - 1
        shape = (1,) * before + inside.shape + (1,) * after
        total = lax.select(
            jnp.broadcast_to(inside.reshape(shape), total.shape), total, lax.full_like(total, 0)
        )
    return total.astype(dtype)


def in_groups(group_sizes: jax.Array, count: int) -> jax.Array:
    """Return which of so many rows are in a group, bool [..., count]."""
    ends = jnp.sum(group_sizes, -1, keepdims=True, dtype=jnp.int32)
    return lax.broadcasted_iota(jnp.int32, (*ends.shape[:-1], count), ends.ndim - 1) < ends


def group_of_rows(group_sizes: jax.Array, count: int) -> jax.Array:
    """Return each row's group, int32; rows of none get the last."""
    if group_sizes.ndim != 1:
        raise ValueError(
            "group_sizes must have one axis where scales differ between groups, got shape "
            f"{group_sizes.shape}. Use one scale for all groups, or vmap."
        )
    ends = lax.cumsum(group_sizes.astype(jnp.int32))
    past = lax.iota(jnp.int32, count)[:, None] >= ends[None, :]
    groups = jnp.sum(past, axis=1, dtype=jnp.int32)
    return lax.min(groups, lax.full_like(groups, group_sizes.shape[0] - 1))
