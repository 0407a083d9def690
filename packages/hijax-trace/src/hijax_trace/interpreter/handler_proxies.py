"""Handler proxies: the array proxies of operands that a handler has moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import jaxpr_as_fun

from .. import compat
from ..dataflow.sources import VIEWS
from ..proxy.array_proxy import ArrayProxy
from ..proxy.follow import follow

_OF_INDEXING = frozenset(
    (
        "dynamic_slice",
        "slice",
        "squeeze",
        "reshape",
        "lt",
        "add",
        "select_n",
        "convert_element_type",
    )
)
"""What functions that take one array of a stack consist of."""


def moved_proxy(value: Any, operands: Mapping[int, ArrayProxy]) -> ArrayProxy | None:
    """Return the array proxy of a handler's value, or None.

    Args:
        value: the value.
        operands: the proxies of the handler's operands, by the ``id`` of their variable.
    """
    if not compat.is_staged(value):
        return None
    var, eqn = compat.producer(value)
    if id(var) in operands:
        return operands[id(var)]
    if eqn is None or eqn.primitive.name not in VIEWS:
        return None
    held = [moved_proxy(operand, operands) for operand in eqn.in_tracers]
    if not any(held):
        return None
    avals = [out.aval for out in eqn.outvars]
    where = (eqn.primitive.name, eqn.params, eqn.in_tracers, held, avals)
    found = follow(*where, lambda i: False, lambda i: frozenset())
    return next((one for out, one in zip(eqn.outvars, found, strict=True) if out is var), None)


def by_variable(values: Any, held: Any) -> dict[int, ArrayProxy]:
    """Return the proxies of values by the ``id`` of the values' variables."""
    pairs = [(x, one) for x, one in zip(values, held, strict=True) if one is not None]
    return {id(compat.producer(x)[0]): one for x, one in pairs if compat.is_staged(x)}


def untransposed(value: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the array before its transposes, and the permutation that they make.

    A kernel that can read several orders of axes need not wait for a transpose.

    Args:
        value: an array of any shape. One that is not being staged is returned as it is.

    Returns:
        The array ``x`` and the permutation ``p``, so that ``value`` is ``x.transpose(p)``.
    """
    order = tuple(range(value.ndim))
    while compat.is_staged(value):
        _, eqn = compat.producer(value)
        if eqn is None or eqn.primitive.name != "transpose":
            break
        (value,), before = eqn.in_tracers, eqn.params["permutation"]
        order = tuple(before[axis] for axis in order)
    return value, order


def unsliced(value: Any) -> tuple[Any, Any] | None:
    """Return the stack that an array is taken from, and its index.

    A kernel that reads an array where it lies in a stack need not wait for a copy.

    Args:
        value: an array.

    Returns:
        The stack, whose shape is that of ``value`` with an axis before, and an integer: a scalar
        array, counted from 0 and clamped to the ends of the stack by whoever reads it. None for an
        array that is not cut out of a stack by the program that is being staged.
    """
    shape = value.shape
    found = _made_of(_inlined(value), ("squeeze", "reshape"))
    if found is None or found.in_tracers[0].shape != (1, *shape):
        return None
    cut = _made_of(_inlined(found.in_tracers[0]), ("dynamic_slice", "slice"))
    if cut is None or cut.in_tracers[0].shape[1:] != shape:
        return None
    if cut.primitive.name == "dynamic_slice":  # which starts at 0 along axes that it takes all of
        return cut.in_tracers[0], cut.in_tracers[1]
    return cut.in_tracers[0], cut.params["start_indices"][0]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two scalars are computed alike of the same values.

    Args:
        one: an array or a number.
        other: another.
    """
    if not compat.is_staged(one) or not compat.is_staged(other):
        return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)
    (first, made), (second, also_made) = compat.producer(one), compat.producer(other)
    if first is second:
        return True
    if made is None or also_made is None:
        literals = isinstance(first, compat.Literal) and isinstance(second, compat.Literal)
        return literals and np.ndim(first.val) == 0 and bool(first.val == second.val)
    operands, others = made.in_tracers, also_made.in_tracers
    return (
        made.primitive is also_made.primitive
        and not made.effects
        and len(made.outvars) == 1
        and len(operands) == len(others)
        and all(x.ndim == 0 for x in (*operands, *others))
        and made.params == also_made.params
        and all(map(is_same, operands, others))
    )


def _inlined(value: Any) -> Any:
    """Return what a small jitted function of slices computes, inlined.

    ``lax.dynamic_index_in_dim`` is such a function. What is not used of it is not compiled.
    """
    eqn = _made_of(value, ("jit", "pjit"))
    if eqn is None or len(eqn.outvars) != 1:
        return value
    names = {one.primitive.name for one in compat.open_of(eqn.params["jaxpr"]).eqns}
    if not names & {"dynamic_slice", "slice"} or not names <= _OF_INDEXING:
        return value
    (found,) = jaxpr_as_fun(eqn.params["jaxpr"])(*eqn.in_tracers)
    return found


def _made_of(value: Any, primitives: tuple[str, ...]) -> Any:
    """Return the equation that made a value, if it has one of these primitives."""
    if not compat.is_staged(value):
        return None
    _, eqn = compat.producer(value)
    return eqn if eqn is not None and eqn.primitive.name in primitives else None
