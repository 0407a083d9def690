"""Slices of an array: the sets of elements that share a scale."""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quant_numerics.formats.qtypes import QType

RaggedTiles: TypeAlias = tuple[tuple[int, int], ...]
"""For each axis whose last tile is shorter, counted from the last axis (-1), its tile size."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of an array: the sets of elements that share a scale.

    Attributes:
      shape: shape of the array.
      tiles: axis -> tile size; the last tile of an axis may be shorter.
      scale_shape: shape of its scale: along each axis 1, the full size, or the number of tiles.
      reduced: the axes within a slice, in the array that ``split`` returns.
    """

    shape: tuple[int, ...]
    tiles: Mapping[int, int]
    scale_shape: tuple[int, ...]
    reduced: tuple[int, ...]

    def split(self, x: jax.Array) -> jax.Array:
        """Split the tiled axes of an array or its scale.

        Tiles that are shorter than others are filled with zeros.
        """
        if not self.tiles:
            return x
        # A scale has an index per tile. An array of one index has it, too, and is not filled up.
        tiles = {a: 1 if x.shape[a] in (1, self.scale_shape[a]) else t
                 for a, t in self.tiles.items()}  # fmt: skip
        return split_axes(x, tiles)[0]

    def join(self, x: jax.Array) -> jax.Array:
        """Undo ``split`` for an array of this shape."""
        tiles = [1 if n == 1 else self.tiles.get(a, 1) for a, n in enumerate(self.shape)]
        whole = tuple(-(-n // t) * t for n, t in zip(self.shape, tiles, strict=True))
        x = x.reshape(whole)
        return x if whole == self.shape else lax.slice(x, (0,) * x.ndim, self.shape)

    def repeated(self, x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
        """Repeat scales, so that there is one for each index of some axes (None: of all)."""
        for axis in range(len(self.shape)) if axes is None else axes:
            # Sizes may be symbolic, which are equal or not, but neither more nor less.
            if axis in self.tiles and x.shape[axis] not in (1, self.shape[axis]):
                x = jnp.repeat(x, self.tiles[axis], axis)
                # The last tile may be shorter.
                x = lax.slice_in_dim(x, 0, self.shape[axis], axis=axis)
        return x

    @property
    def ragged(self) -> RaggedTiles:
        """Return the tiled axes whose last tile is shorter."""
        return ragged_tiles(self.shape, self.tiles)

    @property
    def counts(self) -> int | np.ndarray:
        """Return how many elements each slice has.

        One int if all have the same number; else an array, laid out as by ``split``.
        """
        if not self.ragged:
            return math.prod(self.shape) // max(math.prod(self.scale_shape), 1)
        counts = np.ones((), np.int32)
        for axis, (n, scales) in enumerate(zip(self.shape, self.scale_shape, strict=True)):
            along = [n // scales] * scales if scales else []
            if axis in self.tiles:
                tile = self.tiles[axis]
                along = [min(tile, n - tile * i) for i in range(scales)]
            counts = counts[..., None] * np.asarray(along, np.int32)
            counts = counts[..., None] if axis in self.tiles else counts
        return counts


def slices(
    shape: tuple[int, ...],
    channel_axes: Sequence[int] = (),
    tile_axes: Mapping[int, int | float] | None = None,
) -> Slices:
    """Return the slices of an array by its channel axes and tiles.

    A tile is a number of elements, or, as a float, one over the number of tiles. ValueError: an
    axis that is out of range or named twice; a tile that is not positive, or, if it is a fraction
    of the axis, does not divide that.
    """
    channels = canonical_axes(shape, channel_axes)
    tile_axes = tile_axes or {}
    tiled = canonical_axes(shape, list(tile_axes))
    if len({*channels, *tiled}) < len(channels) + len(tiled):
        raise ValueError(
            "channel and tile axes must all be different, got "
            f"axes {channels} and tiled axes {tiled} of shape {shape}. Name each once."
        )
    tiles = {
        axis: _tile_size(shape, axis, tile)
        for axis, tile in zip(tiled, tile_axes.values(), strict=True)
    }
    scale_shape = tuple(
        n if a in channels else -(-n // tiles[a]) if a in tiles else 1 for a, n in enumerate(shape)
    )
    return _cut(shape, tiles, scale_shape, channels)


def slices_of(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], ragged: RaggedTiles = ()
) -> Slices:
    """Return the slices that the shape of a scale implies, or raise ValueError.

    ``ragged`` are the tile sizes that the shapes don't tell; see ``QArray.ragged_tiles``.
    """
    short = {len(shape) + axis: tile for axis, tile in ragged}
    pairs = list(enumerate(zip(scale_shape, shape, strict=False)))
    fits = len(shape) == len(scale_shape) and all(
        s == -(-n // short[a]) if a in short else s in (1, n) or (s > 0 and n % s == 0)
        for a, (s, n) in pairs
    )
    if not fits:
        also = f", or as many as tiles of {dict(ragged)} (axis: size) are" if ragged else ""
        raise ValueError(
            f"scale must have the axes of an array of shape {shape}, each of size 1, of the full "
            f"size, or of a divisor of it (the number of tiles){also}, got shape {scale_shape}. "
            "Choose other tiles, or give ragged_tiles if the last one is shorter."
        )
    channels = [a for a, (s, n) in pairs if s == n]
    tiles = {
        a: short.get(a, n // max(s, 1)) for a, (s, n) in pairs if a in short or s not in (1, n)
    }
    return _cut(shape, tiles, scale_shape, channels)


def ragged_tiles(shape: tuple[int, ...], tiles: Mapping[int, int]) -> RaggedTiles:
    """Return the tiled axes whose last tile is shorter than others."""
    pairs = zip(canonical_axes(shape, list(tiles)), tiles.values(), strict=True)
    return tuple((a - len(shape), t) for a, t in sorted(pairs) if shape[a] > t and shape[a] % t)


def contraction_tiles(
    shape: Sequence[int], contracting: Sequence[int], tile: int
) -> dict[int, int] | None:
    """Return tiles of contracting axes, as if these were one.

    That one axis is the contracting axes, flattened in their order.

    Args:
      shape: shape of one side.
      contracting: its contracting axes; the last one changes fastest.
      tile: elements that share a scale.

    Returns:
      Axis -> how many of its elements share a scale; 1 is a scale per index. Axes that lie within
      a tile are left out. The last tile of an axis may be shorter. None if a tile would begin
      within an axis and end in another index of an axis before it.
    """
    # From the last axis on, a tile covers whole axes, then a part of one; those before it have a
    # scale per index.
    tiles: dict[int, int] = {}
    for place, axis in reversed(list(enumerate(contracting))):
        size = shape[axis]
        if tile == 1 and tiles:
            tiles[axis] = 1
        elif place and size and tile % size == 0:
            tile //= size
        elif not place or not size or size >= tile:
            tiles[axis], tile = tile, 1
        else:
            return None
    return tiles


def whole_tiles(
    shape: Sequence[int], contracting: Sequence[int], tile: int
) -> dict[int, int] | None:
    """Return ``contraction_tiles`` with the axes that lie within a tile.

    The product of all sizes is then that of a tile, which is what block formats ask for.
    """
    tiles = contraction_tiles(shape, contracting, tile)
    if tiles is None:
        return None
    return {axis: shape[axis] for axis in contracting if shape[axis] > 1} | tiles


def dot_granularity(
    shape: tuple[int, ...],
    contracting: Sequence[int],
    tile: int | float | None,
    channelwise: bool,
) -> tuple[list[int], dict[int, int]]:
    """Return channel and tile axes of one side of a contraction.

    See ``quantize_for_dot``.
    """
    contracting = canonical_axes(shape, contracting)
    channels = [a for a in range(len(shape)) if a not in contracting] if channelwise else []
    if tile is None:
        return channels, {}
    if not contracting:
        raise ValueError(
            f"tile_size must be None where no axis is contracted, got {tile}. Choose a qtype "
            "without blocks."
        )
    sizes = [shape[a] for a in contracting]
    total = math.prod(sizes)
    each = _tile_size((total,), 0, tile)
    tiles = whole_tiles(shape, contracting, each)
    if tiles is None:
        raise ValueError(
            f"tile_size must be a divisor or a multiple of contracted sizes, the last first, got "
            f"{tile} for {sizes}. Choose another."
        )
    alone = [a for a, each in tiles.items() if each == 1 < len(tiles)]
    return channels + alone, {a: each for a, each in tiles.items() if a not in alone}


def check_block(kind: QType, cut: Slices) -> None:
    """Raise a ValueError for other tiles than those of a block format.

    They are of one axis, or hold whole axes and a part of one more.
    """
    parts = [axis for axis, tile in cut.tiles.items() if 1 < tile < cut.shape[axis]]
    if kind.block is None or (math.prod(cut.tiles.values()) == kind.block and len(parts) <= 1):
        return
    raise ValueError(
        f"the tiles of qtype {kind.name!r} must be of {kind.block} elements, along one axis or "
        f"with whole other axes, got {dict(cut.tiles)} (axis: size) for shape {cut.shape}. Pass "
        f"e.g. tile_axes={{-1: {kind.block}}}, or choose a qtype without blocks."
    )


def canonical_axes(shape: tuple[int, ...], axes: Sequence[int]) -> list[int]:
    """Return `axes` made non-negative, or raise a ValueError."""
    ndim = len(shape)
    for axis in axes:
        if not -ndim <= operator.index(axis) < ndim:
            raise ValueError(
                f"an axis of shape {shape} must be from {-ndim} to {ndim - 1}, got {axis}. Choose "
                "another."
            )
    return [operator.index(a) % ndim for a in axes]


def _tile_size(shape: tuple[int, ...], axis: int, tile: int | float) -> int:
    size = round(shape[axis] * tile) if isinstance(tile, float) else operator.index(tile)
    if size <= 0 or (isinstance(tile, float) and shape[axis] % size):
        given = f"{tile}" if size == tile else f"{tile} ({size} elements)"
        raise ValueError(
            "tile size must be a positive number of elements, or one over a number of tiles that "
            f"divides {shape[axis]}, got {given} for axis {axis} of shape {shape}. Choose another."
        )
    return size


def _cut(
    shape: tuple[int, ...],
    tiles: Mapping[int, int],
    scale_shape: tuple[int, ...],
    channels: Sequence[int],
) -> Slices:
    reduced, position = [], 0
    for axis in range(len(shape)):
        position += axis in tiles  # the tile's index comes before its elements
        if axis not in channels:
            reduced.append(position)
        position += 1
    return Slices(shape, tiles, scale_shape, tuple(reduced))


def placed(x: jax.Array, places: Mapping[int, int], ndim: int) -> jax.Array:
    """Return an array of `ndim` axes with the axes of `x` at `places`, and size 1 elsewhere.

    Axes of `x` that have no place are of size 1.
    """
    order = sorted(places, key=places.__getitem__)
    shape = [1] * ndim
    for axis in order:
        shape[places[axis]] = x.shape[axis]
    return x.transpose(*order, *(a for a in range(x.ndim) if a not in places)).reshape(shape)


def split_axes(x: jax.Array, tiles: Mapping[int, int]) -> tuple[jax.Array, list[int]]:
    """Split each axis in `tiles` into (number of tiles, tile size); return the places of old axes.

    A shorter last tile is filled with zeros. The place of a split axis is that of its inner part;
    the tile index is the axis before it.
    """
    shape: list[int] = []
    where: list[int] = []
    missing = [-size % tiles.get(axis, 1) for axis, size in enumerate(x.shape)]
    if any(missing):
        x = lax.pad(x, np.zeros((), x.dtype), [(0, n, 0) for n in missing])
    for axis, size in enumerate(x.shape):
        tile = tiles.get(axis)
        shape.extend((size,) if tile is None else (size // tile, tile))
        where.append(len(shape) - 1)
    return (x.reshape(shape) if tiles else x), where
