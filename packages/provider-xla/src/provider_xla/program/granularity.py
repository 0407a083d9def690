"""Which axes of a parameter have scales, from what the operations do with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Axes = tuple[int | tuple[int, ...] | None, ...]
"""For each axis of a parameter, the axis of the operand that it became: see ``Operand.axes``."""


@dataclass(frozen=True)
class Granularity:
    """Along which axes of an array scales differ.

    Attributes:
        channel_axes: those with a scale per index.
        tile_axes: those with a scale per tile, with the size of a tile.
    """

    channel_axes: tuple[int, ...] = ()
    tile_axes: Mapping[int, int] = field(default_factory=dict)

    def join(self, other: Granularity) -> Granularity:
        """Returns the finest that is no finer than either: both operations can use it."""
        tiles = {}
        for axis in {*self.channel_axes, *self.tile_axes} & {*other.channel_axes, *other.tile_axes}:
            size = math.lcm(self.tile_axes.get(axis, 1), other.tile_axes.get(axis, 1))
            tiles[axis] = size
        channels = tuple(sorted(axis for axis, size in tiles.items() if size == 1))
        return Granularity(channels, {a: size for a, size in sorted(tiles.items()) if size > 1})

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of an array."""
        tiles = self.tile_axes
        return tuple(
            n if a in self.channel_axes else -(-n // tiles[a]) if a in tiles else 1
            for a, n in enumerate(shape)
        )

    def ragged_tiles(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the tiles that do not divide their axis: see ``QArray.ragged_tiles``."""
        return tuple(
            (axis - len(shape), tile)
            for axis, tile in sorted(self.tile_axes.items())
            if shape[axis] > tile and shape[axis] % tile
        )


def of_operand(
    axes: Axes,
    shape: Sequence[int],
    operand_shape: Sequence[int],
    contracted: Sequence[int],
    tile_sizes: Mapping[int, int],
) -> Granularity:
    """Return the finest granularity of a parameter that an operation can use.

    What is contracted has one scale, or one per tile of the contraction. An axis that is gone in
    the operand (a step of a scan) has a scale per index.

    Args:
        axes: where the parameter's axes are in the operand.
        shape: of the parameter.
        operand_shape: of the operand.
        contracted: the contracted axes of the operand, in order.
        tile_sizes: for contracted axes that have more than one scale, the elements that share one.
    """
    channels: list[int] = []
    tiles: dict[int, int] = {}
    merged: dict[int, list[int]] = {}
    for axis, became in enumerate(axes):
        if became is None:
            channels.append(axis)
        elif isinstance(became, int):
            merged.setdefault(became, []).append(axis)
        else:
            kept = [part for part in became if part not in contracted]
            if len(kept) == len(became):
                channels.append(axis)
            elif kept == list(became[: len(kept)]) and kept:
                # The outer parts stay: elements of the inner ones, side by side, share a scale.
                tiles[axis] = shape[axis] // math.prod(operand_shape[part] for part in kept)
            elif not kept:
                _split(axis, became, operand_shape, tile_sizes, channels, tiles)
    for became, parts in merged.items():
        if became not in contracted:
            channels.extend(parts)
        elif len(parts) == 1 and tile_sizes.get(became, 1) > 1:
            tiles[parts[0]] = tile_sizes[became]
        elif became in tile_sizes:
            _tile(parts, shape, tile_sizes[became], channels, tiles)
    return Granularity(tuple(sorted(channels)), dict(sorted(tiles.items())))


def _split(
    axis: int,
    became: Sequence[int],
    operand_shape: Sequence[int],
    tile_sizes: Mapping[int, int],
    channels: list[int],
    tiles: dict[int, int],
) -> None:
    """Tile an axis that became several, all of them contracted."""
    tile = 1
    for place, part in reversed(list(enumerate(became))):
        size, own = operand_shape[part], tile_sizes.get(part)
        tile *= size if own is None else own
        if own is not None and own < size:
            if size % own or any(tile_sizes.get(outer) != 1 for outer in became[:place]):
                return  # not one tile after the other: one scale
            break
    else:
        return
    channels.append(axis) if tile == 1 else tiles.update({axis: tile})


def _tile(
    parts: Sequence[int],
    shape: Sequence[int],
    tile_size: int,
    channels: list[int],
    tiles: dict[int, int],
) -> None:
    """Tiles an axis that several, outer to inner, were merged into."""
    left = tile_size
    for axis in reversed(parts):
        if left == 1:
            channels.append(axis)
        elif left % shape[axis] == 0:
            tiles[axis] = shape[axis]
            left //= shape[axis]
        elif shape[axis] % left == 0:
            tiles[axis], left = left, 1
        else:
            return  # a tile would end within an index of the axis before
