"""Scaled: parameters that a program multiplies or joins with what it computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from ..proxy.updates import WRITTEN
from .expression import Expression, Leaf
from .nodes import Carried, Choice, Device, Exchanged, Held, Operation, Part, Shard, State, Unknown
from .sources import contracts

_SCALES = frozenset(("clamp", "convert_element_type", "div", "max", "min", "mul", "neg"))
_SUMS = frozenset(("add", "sub"))


def scaled_inputs(
    expression: Expression,
    is_parameter: Callable[[str], bool],
    others: Sequence[Expression] = (),
) -> dict[str, bool]:
    """Return the parameters whose elements an activation has, up to factors and noise.

    Examples are a weight that dropout masks, that a style modulates or that is drawn around its
    mean. A bias that is added, or a gain of an activation, is none of them.

    Args:
        expression: the activation.
        is_parameter: whether the input of a pytree path is a parameter.
        others: the other operands of its operation. What the program is given at each call may be
            an activation or a factor of a weight, such as a mask: if these are computed of it, it
            is an activation.

    Returns:
        Their pytree paths, each with whether the program writes into it: then it holds a state,
        such as a cache.
    """
    found: dict[str, bool] = {}
    is_activation = _Activations(is_parameter, others)
    # Whatever is computed from parameters and no activation is a weight, unless it is of rows that
    # the program looks up, or a state.
    behind = [*_behind([expression])]
    if not is_activation(expression) and not any(map(_is_moved_apart, behind)):
        leaves = [one for one in behind if isinstance(one, Leaf) and is_parameter(one.path)]
        if any(len(_shape(one)) > 1 for one in leaves):
            return dict.fromkeys(sorted(one.path for one in leaves), False)
    # A value may be written into at one place, and read as it is at another. Rows of a weight are
    # written into it.
    seen, stack = set[tuple[int, bool, bool]](), [(expression, False, False)]
    while stack:
        node, is_written, is_row = stack.pop()
        if (id(node), is_written, is_row) in seen:
            continue
        seen.add((id(node), is_written, is_row))
        kind = node.judged(is_parameter)
        if kind.kind in ("view", "derived"):
            # One row, such as a gain or a bias, is not a weight that is contracted.
            if is_row or len(_sizes(node)) > 1:
                for path in sorted(kind.paths):
                    found[path] = found.get(path, True) and is_written
            continue
        if isinstance(node, Unknown):  # a state that steps of a loop compute of what it was
            stack += [(start, True, is_row) for start in node.operands[:1]]
        elif isinstance(node, Operation) and node.primitive.name in WRITTEN and node.moved is None:
            into, *updates = (node.operands[i] for i in WRITTEN[node.primitive.name])
            # A state gets activations. What is made of parameters and constants is a weight.
            is_state = any(is_activation(update, given=True) for update in updates)
            stack.append((into, is_written or is_state, is_row))
            stack += [(update, is_written, not is_state) for update in updates]
        else:
            of_node = _elements(node, is_activation)
            stack += [(operand, is_written, is_row) for operand in of_node]
    return found


def _elements(node: Expression, is_activation: _Activations) -> Sequence[Expression]:
    """Return the operands whose elements a value has, up to factors and noise."""
    if isinstance(node, Exchanged | Part | Shard):
        return node.operands
    if isinstance(node, Choice):
        return [node.operands[i] for i in node.moved]
    if isinstance(node, Carried | Held):
        return node.sources
    if not isinstance(node, Operation):
        return ()
    name = node.primitive.name
    if name == "broadcast_in_dim" and _is_repeated(node):
        return ()  # what is repeated for each row is a factor, or a bias
    if node.moved is not None:
        return [node.operands[i] for i in node.moved]
    if name in _SUMS:
        return _terms_with_elements(node, is_activation)
    if name not in _SCALES:
        return ()
    found, shape = node.operands, _shape(node)
    return [
        one
        for i, one in enumerate(found)
        if all(
            _shape(other) != shape or _is_repeated(other) or not is_activation(other)
            for other in (*found[:i], *found[i + 1 :])
        )
    ]


def _terms_with_elements(node: Expression, is_activation: _Activations) -> Sequence[Expression]:
    """Return the terms of a sum whose elements it has.

    Terms that depend on no activation leave another one what it is: noise, and parameters. Several
    that do are a mixture if each is a weight with a factor of an activation; what is repeated and
    added to an activation is a bias of it.
    """
    terms, stack = [], [node]
    while stack:  # the sum of a deep network's layers has a term for each
        one = stack.pop()
        if isinstance(one, Operation) and one.primitive.name in _SUMS:
            stack += one.operands
        else:
            terms.append(one)
    own = [one for one in terms if is_activation(one)]
    if len(own) > 1 and not all(map(is_activation.has_weight, own)):
        return ()
    return terms if len(own) != 1 else own


def _is_moved_apart(node: Expression) -> bool:
    """Return whether it is written into, or rows of a table."""
    if not isinstance(node, Operation):
        return False
    if node.primitive.name not in ("dynamic_slice", "gather"):
        return node.primitive.name in WRITTEN and node.moved is None
    return sum(size != 1 for size in node.params["slice_sizes"]) <= 1


def _is_repeated(node: Expression) -> bool:
    if not isinstance(node, Operation):
        return False
    if node.primitive.name in ("convert_element_type", "reshape"):
        return _is_repeated(node.operands[0])
    is_broadcast = node.primitive.name == "broadcast_in_dim"
    return is_broadcast and _sizes(node) != _sizes(node.operands[0])


class _Activations:
    """Tell values that are computed from activations, beside the other operands."""

    def __init__(self, is_parameter: Callable[[str], bool], others: Sequence[Expression]):
        self._is_parameter, self._others = is_parameter, others

    def has_weight(self, node: Expression) -> bool:
        """Return whether a value has a parameter's elements, up to factors and noise."""
        return bool(scaled_inputs(node, self._is_parameter, self._others))

    def __call__(self, node: Expression, *, given: bool = False) -> bool:
        """Return whether a value is one; with ``given``, also if it may be a factor or noise."""
        for one in _behind([node]):
            # What comes out of a contraction is an activation, whatever it is made of.
            if isinstance(one, State) or (
                isinstance(one, Operation) and contracts(one.primitive, one.params)
            ):
                return True
            if isinstance(one, Unknown) and not one.operands and not isinstance(one, Device):
                return True
            if isinstance(one, Leaf) and self._is_given(one) and (given or one.path in self._known):
                return True
        return False

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        """The inputs of which the other operands are computed."""
        return frozenset(one.path for one in _behind(self._others) if isinstance(one, Leaf))

    def _is_given(self, leaf: Leaf) -> bool:
        """Return whether it is floats that a program is given at each call."""
        return _is_float(leaf) and not self._is_parameter(leaf.path)


def _behind(nodes: Sequence[Expression]) -> Iterator[Expression]:
    """Yield values, and all that they are computed from."""
    seen, stack = set[int](), [*nodes]
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            # A mask of a recurrent weight is behind its state, and no activation for that.
            stack += () if isinstance(one, State) else one.operands


def _is_float(node: Expression) -> bool:
    dtype = getattr(node.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jnp.inexact)


def _shape(node: Expression) -> tuple[int, ...]:
    return getattr(node.aval, "shape", ())


def _sizes(node: Expression) -> list[int]:
    # In an exported program they may be symbols, of which only equality can be asked.
    return [size for size in _shape(node) if size != 1]
