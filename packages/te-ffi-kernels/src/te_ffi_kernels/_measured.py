"""Calls for which XLA was measured to be faster than a kernel.

``measured.json`` has ratios by target and instruction set: the time of a kernel over the time of
what runs without it. ``jaxtap bench TARGET --write`` measures them again on this machine.
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
    """Return why XLA is faster than a kernel, or None; see ``slower_than``.

    Args:
        target: the kernel's target.
        along: the label that the answer depends on, such as ``"rows"``.
        at: the call's value of that label.
        same: labels whose values must be those of the call.
        near: labels that are sizes, with the call's values.
    """
    variants = _table().get(target)
    if not variants:
        return None
    name = instruction_set()
    if name is None:
        return None
    found = slower_than(variants.get(name, ()), along, at, same=same, near=near)
    return None if found is None else f"XLA is faster on {name} {found}"


def instruction_set() -> str | None:
    """Return the instruction set in use; None if ``JAXTAP_ISA`` names none of this machine."""
    from ._stages import isa

    try:
        return isa()
    except RuntimeError:  # the kernel says so when it runs
        return None


@functools.cache
def _table() -> Mapping[str, Any]:
    return read_table(TABLE)
