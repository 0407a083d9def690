"""The layout and the parts of a ragged contraction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from quant_numerics.array.qarray import QArray, effective_scale
from quant_numerics.ops.arithmetic import Arithmetic
from quant_numerics.ops.dot_sides import contracted_tiles, repeated

MOST_PIECES = 32
"""More tiles than this are not multiplied one by one."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a contraction: elements of an axis, with their scale.

    Attributes:
      axes: that axis of the lhs and of the rhs.
      start: its first element.
      limit: the element after its last one.
      tile: the index of its scale along the axis.
      whole: whether it is the whole contraction; then the rest is not used.
    """

    axes: tuple[int, int]
    start: int
    limit: int
    tile: int
    whole: bool

    def of(self, x: jax.Array, side: int) -> jax.Array:
        """Return the part of an operand's elements."""
        if self.whole:
            return x
        return lax.slice_in_dim(x, self.start, self.limit, axis=self.axes[side])

    def of_scale(self, scale: jax.Array, side: int) -> jax.Array:
        """Return the part of an operand's scales."""
        axis = self.axes[side]
        if self.whole or scale.shape[axis] == 1:
            return scale
        return lax.slice_in_dim(scale, self.tile, self.tile + 1, axis=axis)


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
    ) -> Sequence[Piece]:
        """Return the parts of a contraction, by tiles or against overflow."""
        tiles = contracted_tiles(lhs, rhs, *self.contract)
        if len(tiles) > 1 or any(a == self.ragged for a, _ in tiles):
            raise ValueError(
                "tiles of a ragged dot must be along one contracted axis that is not ragged, got "
                f"{tiles} ((lhs axis, rhs axis): size). Choose other tiles."
            )
        size = math.prod(lhs.shape[a] for a in self.contract[0])
        axes = (self.contract[0][0], self.contract[1][0])
        whole = Piece(axes, 0, 0, 0, True)
        if not tiles:
            if how.limit is None or size <= how.limit:
                return [whole]
            length = lhs.shape[axes[0]]
            step = max(how.limit // (size // length), 1)
            if axes[0] == self.ragged:
                # It can't be cut: so many pieces mean that both sides are dequantized.
                return [whole] * (MOST_PIECES + 1)
            return [Piece(axes, i, min(i + step, length), 0, False) for i in range(0, length, step)]
        ((axes, tile),) = tiles.items()
        length = lhs.shape[axes[0]]
        cuts = 1 if how.limit is None else -(-size // length * tile // how.limit)
        step = -(-tile // cuts)
        return [
            Piece(axes, start, min(start + step, end, length), i, False)
            for i, end in enumerate(range(tile, length + tile, tile))
            for start in range(end - tile, min(end, length), step)
        ]

    def scale(self, q: QArray, side: int) -> jax.Array:
        """Return the scales of a side, one per index of kept axes."""
        kept = {a: t for a, t in q.slices.tiles.items() if a not in self.contract[side]}
        return repeated(effective_scale(q), kept, q.shape)

    def in_output(self, scale: jax.Array, side: int, ndim: int) -> jax.Array:
        """Return the scale with the axes of the output."""
        places = self.outputs[side]
        order = sorted(places, key=places.__getitem__)
        # A group axis that was not expanded has size 1, and the ragged one is the other side's.
        rest = [a for a in range(scale.ndim) if a not in places]
        shape = [1] * ndim
        for axis in order:
            shape[places[axis]] = scale.shape[axis]
        return scale.transpose(*order, *rest).reshape(shape)
