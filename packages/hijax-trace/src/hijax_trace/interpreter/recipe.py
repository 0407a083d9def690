"""Recipes: the equations that were made of some values, to be made again of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import compat


class Recipe(NamedTuple):
    """What was made of some values of a staging trace.

    Values have numbers: first those that it was made of, then the scalars that the equations use,
    and the results of these.

    Attributes:
        count: how many values it is made of.
        used: the numbers of those that it uses.
        literals: the scalars, as tracers.
        equations: the equations, each with the numbers of its operands, and its name stack within
            that of the whole.
        results: the numbers of the results.
    """

    count: int
    used: Sequence[int]
    literals: Sequence[Any]
    equations: Sequence[tuple[Any, Sequence[int], Any]]
    results: Sequence[int]

    @classmethod
    def of(
        cls, trace: Any, values: Sequence[Any], before: int, results: Sequence[Any], outer: Any
    ) -> Recipe | None:
        """Return how results were made, or None if that can't be done again.

        Args:
            trace: the trace.
            values: what they were made of. If one is there twice, its first number counts.
            before: how many equations the trace had before.
            results: the results.
            outer: the name stack that was open.
        """
        places: dict[Any, int] = {}
        for i, value in enumerate(values):
            if compat.is_staged_in(value, trace):
                places.setdefault(compat.producer(value)[0], i)
        literals: list[Any] = []

        def numbers(tracers: Sequence[Any]) -> list[Any]:
            found: list[Any] = []
            for tracer in tracers:
                var = compat.producer(tracer)[0] if compat.is_staged_in(tracer, trace) else None
                if type(var) is compat.Literal:
                    literals.append(tracer)
                    found.append(-len(literals))
                else:
                    found.append(places.get(var))
            return found

        equations, last = [], len(values)
        for made in compat.staged_in(trace, before):
            stack = made.source_info.name_stack
            if not compat.can_append(made) or stack[: len(outer)] != outer:
                return None
            inner = stack[len(outer) :] if len(stack) > len(outer) else None
            equations.append((compat.equation_like(made), numbers(made.in_tracers), inner))
            for var in made.outvars:
                places[var], last = last, last + 1
        found = numbers(results)
        if any(None in given for given in (found, *(given for _, given, _ in equations))):
            return None

        count, more = len(values), len(literals)

        def numbered(given: Sequence[int]) -> list[int]:
            return [count - 1 - i if i < 0 else i + more if i >= count else i for i in given]

        equations = [(eqn, numbered(given), inner) for eqn, given, inner in equations]
        found = numbered(found)
        every = {*found, *(i for _, given, _ in equations for i in given)}
        used = sorted(i for i in every if i < count)
        return cls(count, used, literals, equations, found)

    def make(self, trace: Any, value: Callable[[int], Any], info: Any) -> list[Any]:
        """Make the same of other values. Return the results.

        Args:
            trace: the trace.
            value: returns one of the values that it is made of, from its number. Called for those
                that are used.
            info: the source of the whole.
        """
        known = [*(None,) * self.count, *self.literals]
        for i in self.used:
            known[i] = value(i)
        for eqn, numbers, inner in self.equations:
            source = info if inner is None else info.replace(name_stack=info.name_stack + inner)
            known += compat.append(trace, eqn, [known[i] for i in numbers], source)
        return [known[i] for i in self.results]
