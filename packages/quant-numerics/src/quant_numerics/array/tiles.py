"""How an array is cut into slices, the sets of elements that share a scale."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import jax

from quant_numerics.formats.qtypes import QType


@dataclasses.dataclass(frozen=True)
class Slices:
    """Describe the slices of an array of some shape.

    Attributes:
      shape: the array's.
      tiles: axis -> tile size.
      scale_shape: along each axis 1, the full size, or the number of tiles.
      reduced: the axes within a slice, in the array that ``split`` returns.
    """

    shape: tuple[int, ...]
    tiles: Mapping[int, int]
    scale_shape: tuple[int, ...]
    reduced: tuple[int, ...]

    def split(self, x: jax.Array) -> jax.Array:
        """Split the tiled axes of `x`, each of the array's size or the scale's or 1."""
        if not self.tiles:
            return x
        tiles = {
            a: 1 if x.shape[a] == self.scale_shape[a] or x.shape[a] == 1 else t
            for a, t in self.tiles.items()
        }
        return split_axes(x, tiles)[0]


def slices(
    shape: tuple[int, ...],
    channel_axes: Sequence[int] = (),
    tile_axes: Mapping[int, int | float] | None = None,
) -> Slices:
    """Return the slices of an array by its channel axes and tiles.

    Raises:
      ValueError: an axis that is out of range or named twice; a tile that is not positive or does
        not divide its axis.
    """
    channels = canonical_axes(shape, channel_axes)
    tile_axes = tile_axes or {}
    tiled = canonical_axes(shape, list(tile_axes))
    if len({*channels, *tiled}) < len(channels) + len(tiled):
        raise ValueError(
            f"an axis is named twice: axes {channels} and tiled axes {tiled} of shape {shape} "
            "must all be different"
        )
    tiles = {
        axis: _tile_size(shape, axis, tile)
        for axis, tile in zip(tiled, tile_axes.values(), strict=True)
    }
    scale_shape = tuple(
        n if a in channels else n // tiles[a] if a in tiles else 1 for a, n in enumerate(shape)
    )
    return _cut(shape, tiles, scale_shape, channels)


def slices_of(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> Slices:
    """Return the slices that a scale's shape tells of.

    Raises:
      ValueError: a scale that does not fit.
    """
    fits = len(shape) == len(scale_shape) and all(
        s in (1, n) or (s > 0 and n % s == 0) for s, n in zip(scale_shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"scale of shape {scale_shape} does not fit an array of shape {shape}: it needs the "
            "same number of axes, each of size 1, of the full size, or of a divisor of the full "
            "size (the number of tiles)"
        )
    channels = [a for a, n in enumerate(shape) if scale_shape[a] == n]
    tiles = {a: n // s for a, (n, s) in enumerate(zip(shape, scale_shape, strict=True))
             if s not in (1, n)}  # fmt: skip
    return _cut(shape, tiles, scale_shape, channels)


def check_block(kind: QType, cut: Slices) -> None:
    """Raise a ValueError for other tiles than those of a block format."""
    if kind.block is None or list(cut.tiles.values()) == [kind.block]:
        return
    raise ValueError(
        f"qtype {kind.name!r} has a scale per block of {kind.block} elements: it needs exactly one "
        f"tiled axis, with tile size {kind.block}, got tiles {dict(cut.tiles)} (axis: size) for "
        f"shape {cut.shape}; pass e.g. tile_axes={{-1: {kind.block}}}, or choose a qtype without "
        "blocks"
    )


def canonical_axes(shape: tuple[int, ...], axes: Sequence[int]) -> list[int]:
    """Return `axes` made non-negative, or raise a ValueError."""
    ndim = len(shape)
    for axis in axes:
        if not -ndim <= operator.index(axis) < ndim:
            raise ValueError(
                f"axis {axis} is out of range for shape {shape}: axes go from {-ndim} to {ndim - 1}"
            )
    return [operator.index(a) % ndim for a in axes]


def _tile_size(shape: tuple[int, ...], axis: int, tile: int | float) -> int:
    size = round(shape[axis] * tile) if isinstance(tile, float) else operator.index(tile)
    if size <= 0 or shape[axis] % size:
        given = f"{tile}" if size == tile else f"{tile} ({size} elements)"
        raise ValueError(
            f"tile size {given} does not fit axis {axis} of shape {shape}: it must be positive "
            f"and divide {shape[axis]}; choose a divisor, or pad the axis first (a float is one "
            "over the number of tiles)"
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


def split_axes(x: jax.Array, tiles: Mapping[int, int]) -> tuple[jax.Array, list[int]]:
    """Split each axis in `tiles` in two, (number of tiles, tile size).

    Returns:
      The reshaped array and, for each old axis, its new position. For a split axis this is the
      position of the inner part; the tile index is the axis before it.
    """
    shape: list[int] = []
    where: list[int] = []
    for axis, size in enumerate(x.shape):
        tile = tiles.get(axis)
        shape.extend((size,) if tile is None else (size // tile, tile))
        where.append(len(shape) - 1)
    return (x.reshape(shape) if tiles else x), where
