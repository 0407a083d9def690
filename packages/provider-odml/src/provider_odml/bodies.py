"""Bodies: loops and branches made again, with other functions for the programs that they hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from ._compat import parts_of_scan

Function = Callable[[Any], Callable[..., list[Any]]]
"""Returns a jaxpr as a function of its arguments."""


def cond_again(eqn: Any, operands: Sequence[Any], function: Function) -> list[Any]:
    """Return the results of a branch, its programs run as functions: see ``while_again``."""
    index, *rest = operands

    def branch(jaxpr: Any) -> Callable[[], list[Any]]:
        fn = function(jaxpr)

        @functools.wraps(fn)
        def run() -> list[Any]:
            return fn(*rest)

        return run

    branches = list(map(branch, eqn.params["branches"]))
    if len(branches) == 2:
        return lax.cond(index, *branches[::-1])
    return lax.switch(index, branches)


def while_again(eqn: Any, operands: Sequence[Any], function: Function) -> list[Any]:
    """Return the results of a loop, its programs run as functions.

    JAX makes operands of the arrays that they use: it takes no program with constants.

    Args:
        eqn: the equation.
        operands: the new operands. Those that are the same in all steps may be whatever
            ``function`` takes.
        function: returns a program as a function.
    """
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]
    test, body = function(eqn.params["cond_jaxpr"]), function(eqn.params["body_jaxpr"])

    @functools.wraps(test)
    def condition(carry: Sequence[jax.Array]) -> jax.Array:
        return test(*operands[:first], *carry)[0]

    @functools.wraps(body)
    def step(carry: Sequence[jax.Array]) -> list[Any]:
        return body(*operands[first:last], *carry)

    return lax.while_loop(condition, step, list(operands[last:]))


def scan_again(eqn: Any, operands: Sequence[Any], function: Function) -> list[Any]:
    """Return the results of a loop over steps, its program run as a function: see above."""
    params, (consts, carried) = eqn.params, parts_of_scan(eqn)
    body, last = function(params["jaxpr"]), consts + carried

    @functools.wraps(body)
    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        found = body(*operands[:consts], *carry, *x)
        return found[:carried], found[carried:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, list(operands[consts:last]), list(operands[last:]), **options)
    return [*carry, *ys]
