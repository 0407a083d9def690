"""Jaxprs: their equations, and running them with some made otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal


def closed_of(jaxpr: Any) -> Any:
    """Return a jaxpr with its constants' values. That of ``checkpoint`` has none, 0.10.2."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, [])


def equations_in(*values: Any) -> Iterator[Any]:
    """Yield the equations of jaxprs among values, and of those that they hold."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from equations_in(*value)
        for eqn in getattr(value, "eqns", ()):
            yield eqn
            yield from equations_in(*eqn.params.values())


def program_of(eqn: Any) -> Any:
    """Return the jaxpr of an equation that is a call of one; None for other equations."""
    key = _CALLS.get(eqn.primitive.name)
    return None if key is None else eqn.params.get(key)


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call":
          "call_jaxpr", "custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2":
          "jaxpr", "core_call": "call_jaxpr", "transposable": "jaxpr"}  # fmt: skip
"""By primitive, the parameter that is the called program; ``transposable`` is hijax-trace's."""


def evaluated(
    jaxpr: Any,
    arrays: Sequence[Any],
    make: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Return a jaxpr's results.

    Args:
        jaxpr: the jaxpr.
        arrays: its arguments.
        make: returns the results of an equation, called with it and its operands.
        constant: called for each constant and literal, returns what is used instead.
    """
    closed = closed_of(jaxpr)
    values = dict(zip(closed.jaxpr.constvars, map(constant, closed.consts), strict=True))
    values |= zip(closed.jaxpr.invars, arrays, strict=True)

    def read(atom: Any) -> Any:
        return constant(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        values.update(zip(eqn.outvars, make(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, closed.jaxpr.outvars))
