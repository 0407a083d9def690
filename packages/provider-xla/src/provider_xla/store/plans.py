"""Which plans a file can hold: those with what provider-xla's have."""

from __future__ import annotations

from typing import Any

from .errors import StoreError

NEEDED = ("params", "prefix", "weights", "derived", "rules", "lora")
"""What ``save`` and ``load`` read of a plan."""


def check_storable(plan: Any, call: str) -> None:
    """Check that a plan can be kept in a file, or compared with one.

    Args:
        plan: what was given; None is allowed.
        call: what it was given to, ``"save"`` or ``"load"``.

    Raises:
        StoreError: it is the plan of another provider, or not a plan.
    """
    if plan is None or all(hasattr(plan, name) for name in NEEDED):
        return
    instead = (
        "leave plan out: the parameters are saved without it, and a description of the plan can go "
        "along, as in extra={'plan': text}"
        if call == "save"
        else "pass template=, the tree that plan.quantize returns (types are enough)"
    )
    raise StoreError(
        f"plan must be a plan of provider-xla, got a {type(plan).__name__}. Of another provider, "
        f"{instead}."
    )
