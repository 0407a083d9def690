"""Names of matmuls with packed weights that lie in a stack."""

from __future__ import annotations

STACK, GROUPS = "_stack", "_groups"
"""What ends the name of a matmul with one of a stack, and with one per group of rows."""


def of_one(op: str) -> str:
    """Return the name of a matmul with one weight, from that with a stack."""
    return op.removesuffix(STACK).removesuffix(GROUPS)
