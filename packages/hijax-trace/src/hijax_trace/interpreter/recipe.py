"""Recipes: the equations that were made of some values, to be made again of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import compat


class Recipe(NamedTuple):
    """What was made of some values of a staging trace.

    Values are known by places in a list: those that it is made of, scalars, and then the results of
    each equation.

    Attributes:
        used: the numbers of the values that it is made of.
        literals: the scalars that the equations use, as tracers.
        equations: the equations, each with the places of its operands, and its name stack within
            that of the whole.
        results: the places of the results.
    """

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
            values: what they were made of. If one is there twice, its first number counts.
            before: how many equations the trace had before.
            outer: the name stack that was open.
        """

        literals: dict[Any, Any] = {}

        def atom_of(value: Any) -> Any:
            """Return what a value is known by; None for one from elsewhere."""
            if not compat.is_staged_in(value, trace):
                return None
            atom = compat.producer(value)[0]
            if type(atom) is compat.Literal:
                atom = object()
                literals[atom] = value
            return atom

        numbers: dict[Any, int] = {}
        for i, value in enumerate(values):
            if (atom := atom_of(value)) is not None:
                numbers.setdefault(atom, i)
        equations, known = [], {*numbers}
        for made in compat.staged_in(trace, before):
            stack = made.source_info.name_stack
            if not compat.can_append(made) or stack[: len(outer)] != outer:
                return None
            inner = stack[len(outer) :] if len(stack) > len(outer) else None
            operands = list(map(atom_of, made.in_tracers))
            equations.append((compat.equation_like(made), made.outvars, operands, inner))
            known.update(made.outvars)
        found = list(map(atom_of, results))
        needed = {*found, *(atom for _, _, operands, _ in equations for atom in operands)}
        if not needed <= known | literals.keys():
            return None
        used = {atom: i for atom, i in numbers.items() if atom in needed}
        variables = (var for _, own, _, _ in equations for var in own)
        places = {atom: i for i, atom in enumerate((*used, *literals, *variables))}
        placed = [
            (eqn, [places[atom] for atom in operands], inner)
            for eqn, _, operands, inner in equations
        ]
        scalars = tuple(literals.values())
        return cls(tuple(used.values()), scalars, placed, [places[atom] for atom in found])

    def make(self, trace: Any, values: Sequence[Any], info: Any) -> list[Any]:
        """Make the same of other values. Return the results.

        Args:
            values: those that are ``used``, in that order.
        """
        known = [*values, *self.literals]
        for eqn, places, inner in self.equations:
            source = info if inner is None else info.replace(name_stack=info.name_stack + inner)
            known += compat.append(trace, eqn, [known[place] for place in places], source)
        return [known[place] for place in self.results]
