"""Scaled: parameters that a program multiplies or joins with what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from .expression import Expression, Leaf
from .nodes import WRITTEN, Carried, Choice, Held, Operation, Part, Shard, Unknown

_SCALES = frozenset(("convert_element_type", "div", "mul", "neg"))
_SUMS = frozenset(("add", "sub"))
_CONTRACTIONS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot_general"))
_RANDOM = frozenset(("random_bits", "random_gamma", "random_unwrap", "threefry2x32"))


def scaled_inputs(expression: Expression, is_parameter: Callable[[str], bool]) -> dict[str, bool]:
    """Return the parameters whose elements an activation has, up to factors and noise.

    Examples are a weight that dropout masks, that a style modulates or that is drawn around its
    mean. A bias that is added, or a gain of an activation, is none of them.

    Args:
        expression: the activation.
        is_parameter: whether the input of a pytree path is a parameter.

    Returns:
        Their pytree paths, each with whether the program writes into it: then it holds a state,
        such as a cache.
    """
    found: dict[str, bool] = {}
    seen, stack = set[int](), [(expression, False)]
    while stack:
        node, is_written = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        kind = node.judged(is_parameter)
        if kind.kind in ("view", "derived"):
            # One row, such as a gain or a bias, is no weight that is contracted.
            if sum(size > 1 for size in _shape(node)) > 1:
                for path in sorted(kind.paths):
                    found[path] = found.get(path, True) and is_written
            continue
        if isinstance(node, Operation) and node.primitive.name in WRITTEN and node.moved is None:
            into, *updates = (node.operands[i] for i in WRITTEN[node.primitive.name])
            stack += [(into, True), *((update, is_written) for update in updates)]
        else:
            stack += [(operand, is_written) for operand in _elements(node)]
    return found


def _elements(node: Expression) -> Sequence[Expression]:
    """Return the operands whose elements a value has, up to factors and noise."""
    if isinstance(node, Carried | Part | Shard):
        return node.operands
    if isinstance(node, Choice):
        return [node.operands[i] for i in node.moved]
    if isinstance(node, Held):
        return node.sources
    if not isinstance(node, Operation):
        return ()
    name = node.primitive.name
    if name == "broadcast_in_dim" and _is_repeated(node):
        return ()  # what is repeated for each row is a factor, or a bias
    if node.moved is not None:
        return [node.operands[i] for i in node.moved]
    if name not in _SCALES and name not in _SUMS:
        return ()
    found = node.operands
    return [
        one
        for i, one in enumerate(found)
        if all(
            _is_minor(other, name in _SUMS, _size(node)) for j, other in enumerate(found) if j != i
        )
    ]


def _is_minor(node: Expression, is_term: bool, size: int) -> bool:
    """Return whether a factor or term leaves the other one what it is, in a value of ``size``.

    A factor does that is a mask, that is drawn at random, or that is repeated along an axis. Of
    terms only noise does: what is repeated and added to an activation is a bias of it.
    """
    if not is_term and (_size(node) < size or _is_repeated(node)):
        return True
    return _is_drawn(node) or (not is_term and _is_mask(node))


def _is_repeated(node: Expression) -> bool:
    if not isinstance(node, Operation):
        return False
    if node.primitive.name in ("convert_element_type", "reshape"):
        return _is_repeated(node.operands[0])
    is_broadcast = node.primitive.name == "broadcast_in_dim"
    return is_broadcast and _size(node) > _size(node.operands[0])


def _is_mask(node: Expression) -> bool:
    """Return whether a value is made of flags or whole numbers, up to a constant factor."""
    while not _is_discrete(node):
        if not isinstance(node, Operation) or node.primitive.name not in _SCALES:
            return False
        rest = [one for one in node.operands if not one.is_constant]
        if len(rest) != 1:
            return False
        (node,) = rest
    return True


def _is_discrete(node: Expression) -> bool:
    dtype = getattr(node.aval, "dtype", None)
    return dtype is not None and jnp.dtype(dtype).kind in "biu"


def _is_drawn(node: Expression) -> bool:
    """Return whether a value is drawn at random and depends on no activation."""
    is_random, seen, stack = False, set[int](), [node]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        name = one.primitive.name if isinstance(one, Operation) else ""
        if name in _RANDOM:
            is_random = True  # what it is drawn with is a key
        elif name in _CONTRACTIONS or isinstance(one, Leaf | Unknown):
            return False
        else:
            stack += one.operands
    return is_random


def _shape(node: Expression) -> tuple[int, ...]:
    return getattr(node.aval, "shape", ())


def _size(node: Expression) -> int:
    return math.prod(_shape(node))
