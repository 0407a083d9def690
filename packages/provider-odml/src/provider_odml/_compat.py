"""Private JAX, and what depends on its version."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax._src import source_info_util  # 0.10.2 - 0.12
from jax.interpreters import batching  # 0.10.2 - 0.12

from .jaxprs import closed_of


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


def label_of(kind: str, fn: Any) -> str:
    """Return a name for what a loop or branch calls, such as "scan(step)", 0.10.2 - 0.12.

    JAX says so of the functions that it makes itself, of a fori_loop's body.
    """
    info = getattr(fn, "__fun_debug_info__", None)
    if info is not None:
        return f"{info.traced_for}({info.func_name})".replace("/", ".")
    while isinstance(fn, functools.partial):
        fn = fn.func
    return f"{kind}({getattr(fn, '__name__', type(fn).__name__)})".replace("/", ".")


def place_of(eqn: Any) -> Any:
    """Return a context in which operations are where an equation is, 0.10.2 - 0.12."""
    return source_info_util.user_context(_info_of(eqn).traceback, name_stack=_stack_of(eqn))


def where_of(eqn: Any) -> str:
    """Return where an equation is: its name scopes, file and line, 0.10.2 - 0.12."""
    scopes, line = str(_stack_of(eqn)), source_info_util.summarize(_info_of(eqn))
    return f"{scopes} ({line})" if scopes else line


def _info_of(eqn: Any) -> Any:
    """Return where an equation is in the user's files, or else the call that it is in."""
    info = eqn.source_info
    is_users = source_info_util.user_frame(info.traceback) is not None
    return info if is_users else source_info_util.current()


def _stack_of(eqn: Any) -> Any:
    return source_info_util.current_name_stack() + eqn.source_info.name_stack


def parts_of_scan(eqn: Any) -> tuple[int, int]:
    """Return how many of a scan's operands stay the same, and how many it carries."""
    if "num_consts" in eqn.params:  # 0.10.2
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, *_ = eqn.params["ft_in"].unpack()  # 0.11.2 - 0.12
    return len(consts), len(carry)


def composite_attribute(eqn: Any, name: str) -> Any:
    """Return an attribute of a composite's equation, 0.10.2 - 0.12."""
    (leaf,) = next(leaves for key, leaves, _ in eqn.params["attributes"] if key == name)
    return getattr(leaf, "val", leaf)  # of an array that is hashed


def bind_again(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return an equation's results for other operands, 0.10.2 - 0.12."""
    params = eqn.primitive.get_bind_params(eqn.params)
    found = eqn.primitive.bind(*operands, **params)
    return found if eqn.primitive.multiple_results else [found]
