"""Groups: equations of a jaxpr that together spell out a function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .. import compat


class Written(Protocol):
    """What a group of equations computes from the values that it reads."""

    def __call__(self, *values: Any) -> Any:
        """Compute the result of the group from the values of ``Group.inputs``."""


@dataclass(frozen=True, eq=False)
class Group:
    """Equations that compute one value, which a handler may compute at once.

    Attributes:
        name: the name of the operation.
        members: the numbers of the equations, in order. The last one makes the value.
        inputs: the variables whose values ``written`` takes.
        written: what the equations compute.
        also_used: the intermediate values that other equations use, in words. If there are any,
            all equations must run.
        unused: the numbers of dead equations that use intermediate values.
    """

    name: str
    members: tuple[int, ...]
    inputs: tuple[Any, ...]
    written: Written
    also_used: tuple[str, ...] = ()
    unused: tuple[int, ...] = ()

    @property
    def last(self) -> int:
        """The number of the equation that makes the value."""
        return self.members[-1]


def uses(jaxpr: Any, members: Sequence[int]) -> tuple[dict[Any, int], list[int]]:
    """Return which intermediate values of a group other equations use.

    Args:
        jaxpr: the open jaxpr.
        members: the numbers of the group's equations.

    Returns:
        The variables that are used elsewhere, with the numbers of the equations that made them,
        and the numbers of dead equations that use any.
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
