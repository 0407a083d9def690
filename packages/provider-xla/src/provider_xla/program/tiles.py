"""Tiles of a rule for a contraction: whether they fit, and which do instead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import quant_numerics as qn


def tile_elements(tile_size: int | float, size: int) -> int:
    """Return the elements of a tile of a contraction; a float is one over the number of tiles."""
    return round(tile_size * size) if isinstance(tile_size, float) else tile_size


def tiles_of(sizes: Sequence[int], tile_size: int | float) -> dict[int, int] | None:
    """Return how contracted axes of these sizes are tiled; see ``qn.contraction_tiles``."""
    tile = tile_elements(tile_size, math.prod(sizes))
    return qn.contraction_tiles(sizes, range(len(sizes)), tile) if tile > 0 else None


def misfit(sizes: Sequence[int], tile_size: int | float, fallback: str | None = None) -> str | None:
    """Return why a contraction can't be cut in tiles of that size, or None.

    Args:
        sizes: of the contracted axes, the last of which changes fastest.
        tile_size: the rule's.
        fallback: "padded" where the last tile may be shorter.
    """
    if not sizes:
        return "tile_size is for matmuls, and convolutions of float inputs"
    tiles = tiles_of(sizes, tile_size)
    even = tiles is not None and not any(sizes[axis] % tile for axis, tile in tiles.items())
    if even or (tiles is not None and fallback == "padded" and not isinstance(tile_size, float)):
        return None
    return f"tile_size {tile_size} does not divide contracted {list(sizes)}"


def fitted(
    how: qn.HowToQuantize, sizes: Sequence[int], fallback: str | None
) -> tuple[qn.HowToQuantize, str | None]:
    """Return how an operand is quantized, with tiles that its contracted axes can have.

    Args:
        how: the rule's.
        sizes: of the contracted axes; empty where it can have no tiles.
        fallback: the rule's ``tile_fallback``.

    Returns:
        It, and what is done instead of what the rule says, if anything.
    """
    tile = how.tile_size
    why = None if tile is None else misfit(sizes, tile)
    if tile is None or why is None or fallback is None:
        return how, None
    if misfit(sizes, tile, fallback) is None:
        return how, f"{why}: a shorter last tile"
    if qn.get_qtype(how.qtype).block is not None:
        return how, None
    total = math.prod(sizes)
    most = min(tile_elements(tile, total), total) if sizes and fallback != "channel" else 0
    found = next((n for n in range(most, 1, -1) if misfit(sizes, n) is None), None)
    found = None if found == total else found
    got = "one scale per channel" if found is None else f"tiles of {found}"
    return dataclasses.replace(how, tile_size=found), f"{why}: {got}"
