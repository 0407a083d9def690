"""Bodies: loops and branches made again, with other functions for the programs that they hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from ._compat import name_of, parts_of_scan

Run = Callable[[Any, Sequence[Any]], list[Any]]
"""Returns the results of a jaxpr for some arguments."""


def _function(jaxpr: Any, run: Run) -> Callable[..., list[Any]]:
    """Return a program as a function, with its name."""

    def fn(*args: Any) -> list[Any]:
        return run(jaxpr, args)

    fn.__name__ = name_of(jaxpr)
    return fn


def checkpoint_again(eqn: Any, operands: Sequence[Any], run: Run) -> list[Any]:
    """Return the results of a checkpoint: see ``while_again``."""
    params = eqn.params
    options = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
    return jax.checkpoint(_function(params["jaxpr"], run), **options)(*operands)


def cond_again(eqn: Any, operands: Sequence[Any], run: Run) -> list[Any]:
    """Return the results of a branch, its programs run by ``run``: see ``while_again``."""
    index, *rest = operands

    def branch(jaxpr: Any) -> Callable[[], list[Any]]:
        fn = _function(jaxpr, run)

        @functools.wraps(fn)
        def taken() -> list[Any]:
            return fn(*rest)

        return taken

    branches = list(map(branch, eqn.params["branches"]))
    if len(branches) == 2:
        return lax.cond(index, *branches[::-1])
    return lax.switch(index, branches)


def while_again(eqn: Any, operands: Sequence[Any], run: Run) -> list[Any]:
    """Return the results of a loop, its programs run by ``run``.

    JAX makes operands of the arrays that they use: it takes no program with constants.

    Args:
        eqn: the equation.
        operands: the new operands. Those that are the same in all steps may be whatever
            ``run`` takes.
        run: returns the results of a program for its arguments.
    """
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]
    test = _function(eqn.params["cond_jaxpr"], run)
    body = _function(eqn.params["body_jaxpr"], run)

    @functools.wraps(test)
    def condition(carry: Sequence[jax.Array]) -> jax.Array:
        return test(*operands[:first], *carry)[0]

    @functools.wraps(body)
    def step(carry: Sequence[jax.Array]) -> list[Any]:
        return body(*operands[first:last], *carry)

    return lax.while_loop(condition, step, list(operands[last:]))


def scan_again(eqn: Any, operands: Sequence[Any], run: Run) -> list[Any]:
    """Return the results of a loop over steps, its program run by ``run``: see ``while_again``."""
    params, (consts, carried) = eqn.params, parts_of_scan(eqn)
    body, last = _function(params["jaxpr"], run), consts + carried

    @functools.wraps(body)
    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        found = body(*operands[:consts], *carry, *x)
        return found[:carried], found[carried:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, list(operands[consts:last]), list(operands[last:]), **options)
    return [*carry, *ys]
