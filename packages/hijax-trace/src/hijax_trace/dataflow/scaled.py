"""Scaled: parameters that a program multiplies or joins with what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .expression import Expression
from .nodes import WRITTEN, Carried, Choice, Held, Operation, Part, Shard

_SCALES = frozenset(("convert_element_type", "div", "mul", "neg"))


def scaled_inputs(expression: Expression, is_parameter: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the parameters whose elements an activation has, up to factors.

    An example is a weight that dropout masks, or a style modulates. A bias that is added, or a
    vector that scales the rows of an activation, is none of them.

    Args:
        expression: the activation.
        is_parameter: whether the input of a pytree path is a parameter.

    Returns:
        Their pytree paths.
    """
    found: dict[str, None] = {}
    seen, stack = set[int](), [expression]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        kind = node.judged(is_parameter)
        if kind.kind in ("view", "derived"):
            if _size(node) > 1:
                found.update(dict.fromkeys(sorted(kind.paths)))
            continue
        stack += _elements(node)
    return tuple(found)


def _elements(node: Expression) -> Sequence[Expression]:
    """Return the operands whose elements a value has, up to factors."""
    if isinstance(node, Carried | Part | Shard):
        return node.operands
    if isinstance(node, Choice):
        return [node.operands[i] for i in node.moved]
    if isinstance(node, Held):
        return node.sources
    if not isinstance(node, Operation):
        return ()
    name = node.primitive.name
    if name == "broadcast_in_dim" and _size(node) > _size(node.operands[0]):
        return ()  # what is repeated for each row is a factor, or a bias
    if node.moved is not None:
        return [node.operands[i] for i in node.moved]
    if name in WRITTEN:
        return [node.operands[i] for i in WRITTEN[name]]
    return node.operands if name in _SCALES else ()


def _size(node: Expression) -> int:
    aval: Any = node.aval
    return math.prod(getattr(aval, "shape", ()))
