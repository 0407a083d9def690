"""Groups: equations of a jaxpr that together compute what a function of a pattern does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .. import compat


class Written(Protocol):
    """What a group of equations computes, in terms of the values that it reads."""

    def __call__(self, *values: Any) -> Any:
        """Compute the result of the group from the values of ``Group.inputs``."""


@dataclass(frozen=True, eq=False)
class Group:
    """Equations that compute one value, which a handler may compute at once.

    Attributes:
        name: what operations are called.
        members: their places in the jaxpr, in order. The last one makes the value.
        inputs: the variables that ``written`` reads, of which it is called with the values.
        written: what they compute.
        also_used: what of it other equations use; with any, all of them must run anyway.
        unused: the places of equations that use some of it, and that nothing depends on.
    """

    name: str
    members: tuple[int, ...]
    inputs: tuple[Any, ...]
    written: Written
    also_used: tuple[str, ...] = ()
    unused: tuple[int, ...] = ()

    @property
    def last(self) -> int:
        """The place of the equation that makes the value."""
        return self.members[-1]


def uses(jaxpr: Any, members: Sequence[int]) -> tuple[dict[Any, int], list[int]]:
    """Return what of a group others use.

    Args:
        jaxpr: the jaxpr, open.
        members: the places of the group's equations.

    Returns:
        The variables that all but the last have made and that the program uses elsewhere, with the
        places of their equations; and the places of equations that use them in vain.
    """
    inside, last = set(members), members[-1]
    made = {var: i for i in members if i != last for var in jaxpr.eqns[i].outvars}
    used: dict[Any, int] = {}
    unused: list[int] = []
    in_vain: set[Any] = set()
    needed = compat.used_equations(jaxpr)
    for i, eqn in enumerate(jaxpr.eqns):
        found = [] if i in inside else _variables(eqn.invars)
        if needed[i]:
            used.update((var, made[var]) for var in found if var in made)
        elif any(var in made or var in in_vain for var in found):
            unused.append(i)
            in_vain.update(eqn.outvars)
    used.update((var, made[var]) for var in _variables(jaxpr.outvars) if var in made)
    return used, unused


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, compat.Literal)]
