"""Parameters in blocks: through a converter that can't write them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..litert import Blocks, in_blocks
from .program import Exported

_FIRST = 2.0**100
"""The first mark. No parameter has such a scale."""
_STEP = 2.0**-20
"""From one mark to the next, over the first."""


def marked(exported: Sequence[Exported]) -> list[Exported]:
    """Return signatures in which each parameter in blocks has a mark: see ``Grid.stand_in``.

    Equal parameters have one, so that signatures share them in the file.
    """
    marks: dict[bytes, int] = {}
    found = []
    for one in exported:
        values = dict(one.constants.values)
        for where, (matrix, grid) in values.items():
            if grid.block_size:
                about = repr((grid.qtype, grid.axis, grid.block_size, matrix.shape)).encode()
                digest = hashlib.blake2b(about + matrix.tobytes() + grid.scale.tobytes()).digest()
                number = marks.setdefault(digest, len(marks))
                values[where] = matrix, replace(grid, mark=_FIRST * (1 + number * _STEP))
        found.append(replace(one, constants=replace(one.constants, values=values)))
    return found


def with_blocks(model: bytes, exported: Sequence[Exported]) -> bytes:
    """Return a converter's file with the scales of blocks instead of marks.

    Raises:
        OdmlError: the converter wrote a parameter otherwise.
    """
    blocks = {}
    for one in exported:
        for _, grid in one.constants.values.values():
            if grid.block_size:
                scale = grid.scale if grid.axis == 0 else grid.scale.T
                blocks[float(np.float32(grid.mark))] = Blocks(scale, grid.block_size)
    return in_blocks(model, blocks) if blocks else model
