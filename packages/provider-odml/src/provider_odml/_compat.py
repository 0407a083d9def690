"""Private JAX, and what depends on its version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import batching  # 0.10.2 - 0.12


def closed_of(jaxpr: Any) -> Any:
    """Return a jaxpr with its constants' values. That of ``checkpoint`` has none, 0.10.2."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, [])


def define_batching(primitive: Any, rule: Callable[..., Any]) -> None:
    """Define ``vmap`` of a primitive of one operand, 0.10.2 - 0.12.

    Args:
        primitive: the primitive, of one result.
        rule: called with the operand, whose first axis is the batch's, and the parameters;
            returns the result, with the batch first.
    """

    def batch(operands: Any, axes: Any, **params: Any) -> tuple[Any, int]:
        (x,), (axis,) = operands, axes
        return rule(jnp.moveaxis(x, axis, 0), **params), 0

    batching.primitive_batchers[primitive] = batch


def is_mapped(value: Any) -> bool:
    """Return whether a value is one of ``vmap``, 0.10.2 - 0.12."""
    return type(value).__name__ == "BatchTracer"


def scopes_of(eqn: Any) -> list[str]:
    """Return the name scopes of an equation, without transformations, 0.10.2 - 0.12."""
    stack = eqn.source_info.name_stack.stack
    return [entry.name for entry in stack if type(entry).__name__ == "Scope"]


def name_of(jaxpr: Any) -> str:
    """Return the name of the function that a jaxpr was made of, 0.10.2 - 0.12."""
    return closed_of(jaxpr).jaxpr.debug_info.func_name


def parts_of_scan(eqn: Any) -> tuple[int, int]:
    """Return how many of a scan's operands stay the same, and how many it carries."""
    if "num_consts" in eqn.params:  # 0.10.2
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, *_ = eqn.params["ft_in"].unpack()  # 0.11.2 - 0.12
    return len(consts), len(carry)


def bind_again(eqn: Any, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """Return an equation's results for other operands and some other parameters, 0.10.2 - 0.12."""
    params = eqn.primitive.get_bind_params(eqn.params | changed)
    found = eqn.primitive.bind(*operands, **params)
    return found if eqn.primitive.multiple_results else [found]
