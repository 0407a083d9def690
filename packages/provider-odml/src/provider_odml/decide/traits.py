"""Traits of an operation that need no other operation."""

from __future__ import annotations

import hashlib
import math

from ..capture.graph import ACTIVATION, Graph, Node, Use


def is_relu(node: Node) -> bool:
    """Return whether an operation is relu or relu6."""
    if node.op.name in ("relu", "relu6"):
        return True
    return node.op.name == "max" and any(use.scalar == 0.0 for use in node.uses)


def per_channel(use: Use, other: Use) -> bool:
    """Return whether a constant varies along a contraction's channels alone."""
    if other.scalar is not None or math.prod(other.shape) == 1:
        return True
    offset = len(use.shape) - len(other.shape)
    return all(
        size == 1 or (axis + offset in use.channels and size == use.shape[axis + offset])
        for axis, size in enumerate(other.shape)
    )


def fingerprint(node: Node, graph: Graph) -> str:
    """Return what tells apart operations of one id, but for the batch."""
    reads = [(use.slot, use.role, _maker(use, graph), _size(use)) for use in node.uses]
    text = repr((node.op.name, len(node.shape), reads))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _maker(use: Use, graph: Graph) -> str:
    """Return what makes an operand, without its number."""
    maker = graph.nodes.get(use.tensor or "")
    return use.tensor or "" if maker is None else maker.kind


def _size(use: Use) -> tuple[int, ...]:
    # Those of activations hold the batch, somewhere.
    return (len(use.shape),) if use.role == ACTIVATION else use.shape
