"""Called: the programs of functions that a program calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import compat
from .holders import custom_body, holder_of


class Called(NamedTuple):
    """The program of a function's call.

    Attributes:
        jaxpr: the program, a ``jax.extend.core.Jaxpr``. Its ``outvars`` are the call's results.
        inputs: its input variables: first those of constants, then those of the call's operands.
        consts: the values of the constants.
    """

    jaxpr: Any
    inputs: Sequence[Any]
    consts: Sequence[Any]


def called(eqn: Any) -> Called | None:
    """Return the program of a function that an equation calls.

    Such functions are jitted ones, and those with custom derivative rules. With TraceEngine, they
    are also those that the program maps by ``vmap``.

    Args:
        eqn: an equation, a ``jax.extend.core.JaxprEqn``.

    Returns:
        The program; None for loops, branches and other equations, and for a call that the program
        differentiates: its derivative shares what is made of the call.
    """
    jaxpr = _called(eqn)
    if jaxpr is None:
        return None
    opened = compat.open_of(jaxpr)
    return Called(opened, compat.inputs_of(opened), compat.consts_of(jaxpr))


def _called(eqn: Any) -> Any:
    if eqn.primitive is compat.jit_p:
        return eqn.params["jaxpr"]
    if eqn.primitive is compat.deferred_p:
        function = eqn.params["function"]
        return None if function.program.is_differentiated else function.jaxpr
    body = custom_body(eqn.primitive, eqn.params, len(eqn.invars))
    return None if body is None else body.jaxpr


def holds_programs(eqn: Any) -> bool:
    """Return whether an equation is a call, a loop, a branch or another holder of programs.

    A kernel does not count, nor does what combines two elements in a scatter.

    Args:
        eqn: an equation, a ``jax.extend.core.JaxprEqn``.
    """
    if not compat.holds_jaxprs(eqn):
        return False
    held = holder_of(eqn.primitive, eqn.params)
    return held is not None or custom_body(eqn.primitive, eqn.params, len(eqn.invars)) is not None
