"""What depends on no input is computed once at export, and is a constant of the file.

LiteRT has no random numbers, and few operations on integers: a table of random frequencies or of
positions that a model makes itself must be there before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from provider_odml.features import (
    RANDOM,
    Interpreter,
    bind_again,
    closed_of,
    parts_of_scan,
    program_of,
)

from .._compat import place_of, where_of
from ..errors import ConversionError
from .composite import is_dynamic

_AGAIN = ("broadcast_in_dim", "optimization_barrier")
"""Primitives that are emitted for what reads them: an array of one value stays that value, and a
wall a wall."""


def computed_once(fn: Callable[..., Any], types: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return a function of arrays, for arrays of some types, that computes constants beforehand.

    Args:
        fn: the function.
        types: those of its arguments.
    """
    closed = jax.make_jaxpr(fn)(*types)
    return lambda *inputs: _Once().run(closed, inputs)


class _Later:
    """The results of an equation that depends on no input: computed when they are asked for."""

    def __init__(self, eqn: Any, operands: Sequence[Any]):
        self.eqn = eqn
        self.operands = operands
        self.found: Sequence[Any] | None = None

    def waits_for(self) -> list[_Later]:
        """Return what must be computed before."""
        of = [value.of for value in self.operands if isinstance(value, _Result)]
        return [one for one in of if one.found is None]

    def compute(self) -> None:
        """Compute the results: their operands are there."""
        with jax.ensure_compile_time_eval():
            self.found = bind_again(self.eqn, list(map(_now, self.operands)))
        self.operands = ()


class _Result:
    """One of the results of what is computed later."""

    def __init__(self, of: _Later, index: int):
        self.of = of
        self.index = index


def _now(value: Any) -> Any:
    """Return a value, computed if it was not."""
    if not isinstance(value, _Result):
        return value
    # Not by recursion: each step of a loop may wait for the one before it.
    waiting = [value.of]
    while waiting:
        before = waiting[-1].waits_for()
        waiting.extend(before)
        if not before:
            one = waiting.pop()
            if one.found is None:
                one.compute()
    assert value.of.found is not None
    return value.of.found[value.index]


class _Once(Interpreter):
    """Computes once what depends on no argument."""

    def run(self, jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        # Results are arrays to whoever called: they are needed now.
        return list(map(_now, super().run(jaxpr, arrays)))

    def equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        is_known = not any(isinstance(value, jax.core.Tracer) for value in operands)
        if is_known and not _tells_of_scales(eqn) and not eqn.effects:
            later = _Later(eqn, operands)
            return [_Result(later, i) for i in range(len(eqn.outvars))]
        with place_of(eqn):
            program = program_of(eqn)
            if program is not None:
                # As a part of its caller: what it returns may not be needed either.
                return super().run(program, operands)
            return super().equation(eqn, self._needed(eqn, operands))

    def _needed(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Return an equation's operands as arrays, but those that bodies take as they are."""
        held = _bodies(eqn, operands)
        if eqn.primitive.name == "cond":  # whose branches take all behind the number
            return [_operand(operands[0]), *operands[1:]]
        count = sum(map(len, held.values()))
        return [*operands[:count], *map(_operand, operands[count:])]


def _tells_of_scales(eqn: Any) -> bool:
    """Return whether an equation tells the converter a tensor's scale."""
    # The device finds no scale of a constant: it is rounded here.
    return eqn.primitive.name == "composite" and not is_dynamic(eqn)


def _operand(value: Any) -> Any:
    """Return what an equation reads."""
    if isinstance(value, _Result) and value.of.found is None:
        eqn = value.of.eqn
        is_small = all(math.prod(atom.aval.shape) == 1 for atom in eqn.invars)
        if eqn.primitive.name == _AGAIN[1] or (eqn.primitive.name == _AGAIN[0] and is_small):
            found = bind_again(eqn, list(map(_operand, value.of.operands)))
            return found[value.index]
    return _now(value)


def _bodies(eqn: Any, operands: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Return, by parameter that is a body or several, what their first arguments are."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        test, body = params["cond_nconsts"], params["body_nconsts"]
        return {"cond_jaxpr": operands[:test], "body_jaxpr": operands[test : test + body]}
    if name == "scan":
        return {"jaxpr": operands[: parts_of_scan(eqn)[0]]}
    return {"branches": operands[1:]} if name == "cond" else {}


def check_random(closed: ClosedJaxpr) -> None:
    """Refuse a program whose random numbers depend on an input.

    Args:
        closed: the program, its loops written out. Those that stay loops have other random
            numbers in each step: that is refused, too.

    Raises:
        ConversionError: names the operation.
    """
    _Depends().run(closed, [True] * len(closed.in_avals))


class _Depends(Interpreter):
    """Finds what depends on an input. Its values are whether they do."""

    def constant(self, value: Any) -> bool:
        return False

    def equation(self, eqn: Any, operands: list[bool]) -> Sequence[bool]:
        if not any(operands):
            return [False] * len(eqn.outvars)
        if eqn.primitive.name in RANDOM:
            raise ConversionError(
                "Random numbers must depend on no input, since LiteRT makes none, got some that "
                f"do at {where_of(eqn)}. Export the function as it is for inference, without "
                "dropout, or pass the numbers as an input. From a key that is not an argument they "
                "are constants."
            )
        program = program_of(eqn)
        with place_of(eqn):
            if program is not None:
                return self.run(program, operands)
            for key, first in _bodies(eqn, operands).items():
                bodies = eqn.params[key]
                for body in bodies if isinstance(bodies, tuple) else (bodies,):
                    count = len(closed_of(body).in_avals) - len(first)
                    self.run(body, [*first, *[True] * count])
        return [True] * len(eqn.outvars)
