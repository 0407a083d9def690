"""Handler proxies: the array proxies of operands that a handler has moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import compat
from ..dataflow.nodes import VIEWS
from ..proxy.array_proxy import ArrayProxy
from ..proxy.follow import follow


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
    found = follow(*where, lambda i: False)
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
