"""Evaluate: the values of expressions, for all steps of loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def evaluated(expression: Any, inputs: Mapping[str, jax.Array]) -> jax.Array:
    """Compute the value of an expression: see ``Expression.evaluate``."""
    nodes = list(expression.nodes())
    depths = sorted({node.depth for node in nodes if node.depth is not None})

    def run(known: dict[int, Any], level: int) -> Any:
        if level == len(depths):
            return _computed(expression, known, inputs)
        # Each level of loops becomes one vmap, over all values that the loop steps along.
        parts = [x for x in nodes if x.depth == depths[level]]
        wholes = [_computed(part.operands[0], known, inputs) for part in parts]

        def one(values: list[Any]) -> Any:
            found = {id(part): value for part, value in zip(parts, values, strict=True)}
            return run({**known, **found}, level + 1)

        return jax.vmap(one, ([part.axis for part in parts],))(wholes)

    return run({}, 0)


def _computed(expression: Any, known: Mapping[int, Any], inputs: Mapping[str, Any]) -> Any:
    """Compute the value of one step."""
    values = dict(known)
    results: dict[tuple, Any] = {}
    stack = [expression]
    while stack:
        node = stack[-1]
        missing = [x for x in node.operands if id(x) not in values]
        if id(node) in values:
            stack.pop()
        elif missing:
            stack += missing
        else:
            operands = [values[id(x)] for x in node.operands]
            values[id(node)] = node.compute(operands, inputs, results)
            stack.pop()
    return values[id(expression)]
