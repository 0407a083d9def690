"""Replay: moves array proxies as an expression moves their arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..proxy.array_proxy import ArrayProxy, Lost, form_of
from ..proxy.move import MoveError, is_shared
from ..proxy.moves import SAME_ELEMENTS
from .expression import Expression, Leaf
from .follow import follow
from .nodes import Choice, Constant, Operation, Part


def replay(
    expression: Expression, stands_for: Callable[[Expression], ArrayProxy | None]
) -> ArrayProxy:
    """Return the array proxy of a view, from proxies before it.

    Under ``jax.eval_shape`` this tells which proxies follow a view before the program runs. The
    first step stands for all steps of a loop, and index zero for one that the program computes.

    Args:
        expression: the view, a chain of moves.
        stands_for: returns the proxy of a node, or None. Nodes before one with a proxy are not
            asked. Inputs without one are left out where the program chooses among several.

    Raises:
        MoveError: a proxy does not follow a move, or the expression does more than move elements.
    """
    found: dict[int, Any] = {}
    results: dict[tuple, Any] = {}
    stack = [expression]
    while stack:
        node = stack[-1]
        if id(node) not in found and (proxy := stands_for(node)) is not None:
            found[id(node)] = proxy
        missing = [x for x in _data(node) if id(x) not in found] if id(node) not in found else []
        if missing:
            stack += missing
            continue
        stack.pop()
        if id(node) not in found:
            data = _chosen(node, [found[id(x)] for x in _data(node)])
            found[id(node)] = None if data is None else _moved(node, data, results)
    if found[id(expression)] is None:
        raise MoveError(f"nothing of {expression} has a proxy")
    return found[id(expression)]


def _chosen(node: Expression, data: list[ArrayProxy | None]) -> list[ArrayProxy] | None:
    """Return proxies for all that a node moves; None for an input without one and its views."""
    known = [one for one in data if one is not None]
    if isinstance(node, Leaf) or (data and not known):
        return None
    if len(known) == len(data):
        return known
    if not _chooses(node):
        raise MoveError(f"{node} joins values with and without proxies")
    # Another value that may be chosen instead has the same form, or can't be chosen.
    return [known[0] if one is None else one for one in data]


def _chooses(node: Expression) -> bool:
    name = node.primitive.name if isinstance(node, Operation) else ""
    return isinstance(node, Choice) or name == "select_n"


def root_of(expression: Expression, is_parameter: Callable[[str], bool]) -> Expression:
    """Return the input, or computed or joined value, of a view.

    Args:
        expression: the view.
        is_parameter: whether the input of a pytree path is a parameter.
    """
    node = expression
    while len(data := _data(node)) == 1:
        # Parameters may mask a view: the result is computed, not moved.
        if (node.kind(is_parameter), data[0].kind(is_parameter)) == ("derived", "view"):
            break
        (node,) = data
    return node


def is_chosen(expression: Expression) -> bool:
    """Return whether a view is one of several values of its shape, and joins none."""
    stack, several = [expression], False
    while stack:
        node = stack.pop()
        data = _data(node)
        if len(data) > 1 and not _chooses(node):
            return False
        several |= len(data) > 1
        stack += data
    return several


def mapped_axes(view: Expression, beside: Expression) -> frozenset[int]:
    """Return the input's axes along which a ``vmap`` maps a view alone.

    A matmul of an activation and such a view is a part of the matmul with the whole input.

    Args:
        view: a view of one input by transposes, steps and examples. For others the result is
            empty.
        beside: the other operand of the matmul. A map of both does not count.
    """
    node, chain = view, []
    while not isinstance(node, Leaf):
        chain.append(node)
        data = _data(node)
        name = node.primitive.name if isinstance(node, Operation) else ""
        if len(data) != 1 or name not in ("", "transpose", "convert_element_type", *SAME_ELEMENTS):
            return frozenset()
        (node,) = data
    full: Any = node.aval
    axes, found = list(range(len(full.shape))), set()
    for node in reversed(chain):
        if isinstance(node, Part):
            axis = axes.pop(node.axis)
            if node.is_mapped and not beside.maps >> node.depth & 1:
                found.add(axis)
        elif isinstance(node, Operation) and node.primitive.name == "transpose":
            axes = [axes[i] for i in node.params["permutation"]]
    return frozenset(found)


def mapped_rows(value: Expression, beside: Expression) -> int:
    """Return over how many examples a ``vmap`` maps a value alone.

    Args:
        value: the value.
        beside: the other operand of the matmul. A map of both does not count.
    """
    count, node = 1, value
    while isinstance(node, Part) or (isinstance(node, Operation) and len(_data(node)) == 1):
        (whole,) = _data(node)
        if isinstance(node, Part) and node.is_mapped and not beside.maps >> node.depth & 1:
            full: Any = whole.aval
            count *= full.shape[node.axis]
        node = whole
    return count


def carriers_of(expression: Expression) -> list[str]:
    """Return the inputs that pass all loops and maps of a value.

    Each step of the loops has a part of such an input, so that values for the steps can travel
    with it; see ``Carrier``.

    Args:
        expression: the value.

    Returns:
        The inputs' pytree paths.
    """
    nodes = list(expression.nodes())
    depths = frozenset(node.depth for node in nodes if isinstance(node, Part))
    found = []
    for leaf in expression.leaves():
        ways: dict[int, set[frozenset[int]]] = {}
        for node in nodes:
            is_it = isinstance(node, Leaf) and node.path == leaf.path
            own = {frozenset[int]()} if is_it else set()
            for operand in node.operands:
                own |= ways[id(operand)]
            own = {way | {node.depth} for way in own} if isinstance(node, Part) else own
            ways[id(node)] = own
        if depths in ways[id(expression)]:
            found.append(leaf.path)
    return found


def _data(node: Expression) -> list[Expression]:
    """Return the operands whose elements a node has."""
    if isinstance(node, Operation | Choice) and node.moved is not None:
        return [node.operands[i] for i in node.moved]
    return [*node.operands] if isinstance(node, Part) else []


def _moved(node: Expression, data: list[ArrayProxy], results: dict[tuple, Any]) -> ArrayProxy:
    if isinstance(node, Part):
        steps = data[0].step(node.axis, node.is_mapped)
        if isinstance(steps, Lost):
            raise MoveError(steps.why)
        return jax.tree.map(lambda x: x.value if is_shared(x) else x[0], steps, is_leaf=is_shared)
    if isinstance(node, Choice):
        if len(set(map(form_of, data))) > 1:
            raise MoveError("branches that return weights in several forms")
        return data[0]
    if not isinstance(node, Operation) or node.moved is None:
        raise MoveError(f"{node} is not a view")
    if node.primitive.name in SAME_ELEMENTS:
        return data[0]
    key = (id(node.params), *map(id, node.operands))
    if key not in results:
        held: list[ArrayProxy | None] = [None] * len(node.operands)
        for i, proxy in zip(node.moved, data, strict=True):
            held[i] = proxy
        pairs = zip(held, node.operands, strict=True)
        values = [_value(operand) if one is None else None for one, operand in pairs]
        how = node.primitive.name, node.params, values, held, [node.aval]
        results[key] = follow(*how, node.operands.__getitem__)
    first = results[key][0]
    if isinstance(first, Lost):  # with all other results
        raise MoveError(first.why)
    return results[key][node.result]


def _value(node: Expression) -> Any:
    if isinstance(node, Constant):
        return node.value
    aval: Any = node.aval
    return jnp.zeros(aval.shape, aval.dtype)
