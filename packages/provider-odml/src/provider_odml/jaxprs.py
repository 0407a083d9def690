"""Jaxprs: their equations, and running them with some made otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from ._compat import bind_again, closed_of, name_of, parts_of_scan

Run = Callable[[Any, Sequence[Any]], list[Any]]
"""Returns the results of a jaxpr for some arguments."""


def equations_in(*values: Any) -> Iterator[Any]:
    """Yield the equations of jaxprs among values, and of those that they hold."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from equations_in(*value)
        for eqn in getattr(value, "eqns", ()):
            yield eqn
            yield from equations_in(*eqn.params.values(), _deferred_by(eqn))


def program_of(eqn: Any) -> Any:
    """Return the jaxpr of an equation that is a call of one; None for other equations."""
    key = _CALLS.get(eqn.primitive.name)
    return _deferred_by(eqn) if key is None else eqn.params.get(key)


def _deferred_by(eqn: Any) -> Any:
    """Return the program of what a handler made of a linear operation; None for other equations.

    It is hijax-trace's, which transposes the derivative of it.
    """
    return eqn.params["function"].jaxpr if eqn.primitive.name == "deferred" else None


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call":
          "call_jaxpr", "custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2":
          "jaxpr", "core_call": "call_jaxpr"}  # fmt: skip
"""By primitive, the parameter that is the called program."""


class Interpreter:
    """Runs jaxprs, equation by equation. Subclasses make some equations otherwise.

    Rules of ``custom_jvp`` and ``custom_vjp`` are left out where called functions are run as a part
    of their caller: it is not for programs that are differentiated.

    Values may be whatever a subclass makes of equations: arrays, or what it knows of them.
    """

    def run(self, jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        """Return the results of a jaxpr.

        Args:
            jaxpr: the jaxpr, open or closed.
            arrays: its arguments.
        """
        closed = closed_of(jaxpr)
        values = dict(zip(closed.jaxpr.constvars, map(self.constant, closed.consts), strict=True))
        values |= zip(closed.jaxpr.invars, arrays, strict=True)

        def read(atom: Any) -> Any:
            return self.constant(atom.val) if isinstance(atom, Literal) else values[atom]

        for eqn in closed.jaxpr.eqns:
            found = self.equation(eqn, list(map(read, eqn.invars)))
            values.update(zip(eqn.outvars, found, strict=True))
        return list(map(read, closed.jaxpr.outvars))

    def constant(self, value: Any) -> Any:
        """Return what stands for a constant or literal."""
        return value

    def equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Return the results of an equation.

        A called function is run as a part of its caller; loops and branches are made again, of
        programs that this interpreter runs.

        Args:
            eqn: the equation.
            operands: what its operands are.
        """
        program = program_of(eqn)
        if program is not None:
            return self.run(program, operands)
        again = HOLDERS.get(eqn.primitive.name)
        return bind_again(eqn, operands) if again is None else again(eqn, operands, self.run)


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

    JAX makes operands of the arrays that they use: it takes no program with constants. A loop that
    ``vmap`` made may have a condition for each element: it runs as long as one holds, and elements
    whose condition does not hold any more stay as they are.

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
    # lax.while_loop takes no such condition: JAX's own lowering does what is done here.
    is_mapped = closed_of(eqn.params["cond_jaxpr"]).jaxpr.outvars[0].aval.ndim > 0

    @functools.wraps(test)
    def condition(carry: Sequence[jax.Array]) -> jax.Array:
        (goes,) = test(*operands[:first], *carry)
        return goes.any() if is_mapped else goes

    @functools.wraps(body)
    def step(carry: Sequence[jax.Array]) -> list[Any]:
        found = body(*operands[first:last], *carry)
        if not is_mapped:
            return found
        (goes,) = test(*operands[:first], *carry)
        return [
            jnp.where(lax.expand_dims(goes, range(goes.ndim, new.ndim)), new, old)
            for new, old in zip(found, carry, strict=True)
        ]

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


HOLDERS = {"cond": cond_again, "scan": scan_again, "while": while_again}
"""By primitive, how an equation that holds programs is made again."""
