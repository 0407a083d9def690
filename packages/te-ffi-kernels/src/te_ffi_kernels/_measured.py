"""What was measured of the kernels: where XLA is faster.

``measured.json`` has the ratio of a kernel's time to that of what runs without it, by target and
instruction set. ``jaxtap bench TARGET --write`` measures it again, on the machine that it runs on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interception_core import read_table, slower_than

TABLE = Path(__file__).with_name("measured.json")


def slower(
    target: str, along: str, at: int, same: Mapping[str, str | int], near: Mapping[str, int]
) -> str | None:
    """Return why XLA is faster than a kernel, or None; see ``slower_than``."""
    variants = _table().get(target)
    if not variants:
        return None
    from ._stages import isa

    try:
        name = isa()
    except RuntimeError:  # JAXTAP_ISA names none of this machine: the kernel says so when it runs
        return None
    found = slower_than(variants.get(name, ()), along, at, same=same, near=near)
    return None if found is None else f"XLA is faster on {name} {found}"


@functools.cache
def _table() -> Mapping[str, Any]:
    return read_table(TABLE)
