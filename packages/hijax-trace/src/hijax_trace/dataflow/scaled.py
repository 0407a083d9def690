"""Scaled: parameters that a program multiplies or joins with what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .expression import Expression, Leaf
from .nodes import WRITTEN, Carried, Choice, Held, Operation, Part, Shard, Unknown

_SCALES = frozenset(("clamp", "convert_element_type", "div", "max", "min", "mul", "neg"))
_SUMS = frozenset(("add", "sub"))
_CONTRACTIONS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot_general"))


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
    # A value may be written into at one place, and read as it is at another.
    seen, stack = set[tuple[int, bool]](), [(expression, False)]
    while stack:
        node, is_written = stack.pop()
        if (id(node), is_written) in seen:
            continue
        seen.add((id(node), is_written))
        kind = node.judged(is_parameter)
        if kind.kind in ("view", "derived"):
            # One row, such as a gain or a bias, is not a weight that is contracted.
            if sum(size > 1 for size in _shape(node)) > 1:
                for path in sorted(kind.paths):
                    found[path] = found.get(path, True) and is_written
            continue
        if isinstance(node, Operation) and node.primitive.name in WRITTEN and node.moved is None:
            into, *updates = (node.operands[i] for i in WRITTEN[node.primitive.name])
            stack += [(into, True), *((update, is_written) for update in updates)]
        else:
            stack += [(operand, is_written) for operand in _elements(node, is_parameter)]
    return found


def _elements(node: Expression, is_parameter: Callable[[str], bool]) -> Sequence[Expression]:
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
    found, size = node.operands, _size(node)
    return [
        one
        for i, one in enumerate(found)
        if all(
            _is_minor(other, name in _SUMS, size, is_parameter)
            for other in (*found[:i], *found[i + 1 :])
        )
    ]


def _is_minor(
    node: Expression, is_term: bool, size: int, is_parameter: Callable[[str], bool]
) -> bool:
    """Return whether a factor or term leaves the other one what it is, in a value of ``size``.

    A factor or bound does that is repeated along an axis, and factors and terms that depend on no
    activation: masks, what is drawn at random, and parameters. What is repeated and added to an
    activation is a bias of it. Weights in a mixture may have factors of an activation each.
    """
    if not is_term and (_size(node) < size or _is_repeated(node)):
        return True
    if not _depends_on_activations(node, is_parameter):
        return True
    return is_term and bool(scaled_inputs(node, is_parameter))


def _is_repeated(node: Expression) -> bool:
    if not isinstance(node, Operation):
        return False
    if node.primitive.name in ("convert_element_type", "reshape"):
        return _is_repeated(node.operands[0])
    is_broadcast = node.primitive.name == "broadcast_in_dim"
    return is_broadcast and _size(node) > _size(node.operands[0])


def _depends_on_activations(node: Expression, is_parameter: Callable[[str], bool]) -> bool:
    """Return whether a value is computed from floats that are given at each call."""
    seen, stack = set[int](), [node]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Unknown):
            return True
        if isinstance(one, Leaf):
            if not is_parameter(one.path) and _is_float(one):
                return True
        # What comes out of a contraction is an activation, whatever it is made of.
        elif isinstance(one, Operation) and one.primitive.name in _CONTRACTIONS:
            return True
        else:
            stack += one.operands
    return False


def _is_float(node: Expression) -> bool:
    dtype = getattr(node.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jnp.inexact)


def _shape(node: Expression) -> tuple[int, ...]:
    return getattr(node.aval, "shape", ())


def _size(node: Expression) -> int:
    return math.prod(_shape(node))
