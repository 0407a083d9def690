"""Granularity: the axes along which scales differ, and tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import quant_numerics as qn

from .facts import Code, Fact

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
        """Return the finest granularity that both operations can use."""
        # Scales may differ only along axes where both allow it. Tiles of the least common multiple
        # hold whole tiles of both.
        tiles = {}
        for axis in {*self.channel_axes, *self.tile_axes} & {*other.channel_axes, *other.tile_axes}:
            size = math.lcm(self.tile_axes.get(axis, 1), other.tile_axes.get(axis, 1))
            tiles[axis] = size
        channels = tuple(sorted(axis for axis, size in tiles.items() if size == 1))
        return Granularity(channels, {a: size for a, size in sorted(tiles.items()) if size > 1})

    def in_blocks(self, shape: Sequence[int], block: int) -> Granularity | None:
        """Return the same in tiles of a format's blocks; None if these are other tiles."""
        # A block may hold whole axes, such as a head that is smaller than it.
        rest = (*self.channel_axes, *self.tile_axes)
        whole = {axis: n for axis, n in enumerate(shape) if axis not in rest and n > 1}
        tiles = dict(sorted({**self.tile_axes, **whole}.items()))
        found = math.prod(tiles.values())
        return Granularity(self.channel_axes, tiles) if found == block else None

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of an array."""
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

    Contracted axes have one scale, or one per tile of the contraction. An axis that the operand
    lacks (a step of a scan) has a scale per index. ``axes`` are those that the parameter's became.
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
    """Tile an axis that several, outer to inner, were merged into."""
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


def tile_elements(tile_size: int | float, size: int) -> int:
    """Return how many elements a rule's tile has: a float is one over the number of tiles."""
    return round(tile_size * size) if isinstance(tile_size, float) else tile_size


def tiles_of(sizes: Sequence[int], tile_size: int | float) -> dict[int, int] | None:
    """Return how contracted axes of these sizes are tiled; see ``qn.contraction_tiles``."""
    tile = tile_elements(tile_size, math.prod(sizes))
    return qn.contraction_tiles(sizes, range(len(sizes)), tile) if tile > 0 else None


def misfit(
    sizes: Sequence[int], how: qn.HowToQuantize | None, fallback: str | None = None
) -> Fact | None:
    """Return why a contraction cannot have an operand's tiles, or None.

    ``sizes`` are of the contracted axes, the last of which changes fastest. With the fallback
    "padded" the last tile may be shorter.
    """
    if how is None or how.tile_size is None:
        return None
    tile_size, nowhere, uneven = how.tile_size, Code.NO_TILES, Code.MISFIT
    about: dict[str, Any] = {"tile": tile_size}
    if qn.get_qtype(how.qtype).block is not None:
        nowhere, uneven, about["qtype"] = Code.NO_BLOCKS_HERE, Code.BLOCK_MISFIT, how.qtype
    if not sizes:
        return nowhere(**about)
    tiles = tiles_of(sizes, tile_size)
    even = tiles is not None and not any(sizes[axis] % tile for axis, tile in tiles.items())
    if even or (tiles is not None and fallback == "padded" and not isinstance(tile_size, float)):
        return None
    return uneven(**about, sizes=tuple(sizes))


FALLBACKS = ("divisor", "channel", "padded")
"""What a rule's ``tile_fallback`` may be, besides None."""


def remedies(sizes: Sequence[int], hows: Sequence[qn.HowToQuantize | None]) -> tuple[str, ...]:
    """Return what a rule may have instead of tiles that don't divide contracted axes."""

    def helps(fallback: str) -> bool:
        found, _ = all_fitted(sizes, fallback, tuple(hows))
        return not any(misfit(sizes, how, fallback) for how in found)

    found = [f"tile_fallback={name!r}" for name in FALLBACKS if helps(name)]
    if any(how and qn.get_qtype(how.qtype).block is not None for how in hows):
        found.append("a format without blocks, such as 'int8' or 'int4'")
    else:
        found.append("another tile_size")
    return tuple(found)


def fitted(
    how: qn.HowToQuantize, sizes: Sequence[int], fallback: str | None
) -> tuple[qn.HowToQuantize, Fact | None]:
    """Return an operand's quantization with tiles that fit, and what is done instead of the rule.

    ``sizes`` are of the contracted axes, empty where it can have no tiles.
    """
    tile, why = how.tile_size, misfit(sizes, how)
    if tile is None or why is None or fallback is None:
        return how, None
    if misfit(sizes, how, fallback) is None:
        return how, Code.SHORTER_TILE(why=why)
    if qn.get_qtype(how.qtype).block is not None:
        return how, None
    total = math.prod(sizes)
    most = min(tile_elements(tile, total), total) if sizes and fallback != "channel" else 0
    tried = (dataclasses.replace(how, tile_size=n) for n in range(most, 1, -1))
    found = next((one.tile_size for one in tried if misfit(sizes, one) is None), None)
    found = None if found == total else found
    done = Code.PER_CHANNEL(why=why) if found is None else Code.OTHER_TILES(why=why, tile=found)
    return dataclasses.replace(how, tile_size=found), done


def all_fitted(
    sizes: Sequence[int],
    fallback: str | None,
    hows: tuple[qn.HowToQuantize | None, ...],
) -> tuple[tuple[qn.HowToQuantize | None, ...], tuple[Fact, ...]]:
    """Return how operands are quantized, with tiles that fit, and what is done instead."""
    tiled = [how for how in hows if how]
    found = {how: fitted(how, sizes, fallback) for how in tiled}
    # Both sides have the same tiles, those of a format with blocks.
    blocks = any(qn.get_qtype(how.qtype).block is not None for how in tiled)
    if blocks and any(new is not how for how, (new, _) in found.items()):
        return hows, ()
    remarks = tuple(dict.fromkeys(done for _, done in found.values() if done))
    return tuple(how and found[how][0] for how in hows), remarks
