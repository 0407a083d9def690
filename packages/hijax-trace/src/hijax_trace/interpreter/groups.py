"""Groups: functions that a program writes out in several equations."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from interception_core import TargetError

from .. import compat

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Equations of a program that compute one value, which a handler may compute at once.

    Attributes:
        name: the name of the operation.
        members: the numbers of the equations, in order. The last one makes the value, its only
            result.
        inputs: the variables whose values ``written`` takes. No member makes them.
        written: what the equations compute: takes the values of ``inputs``, and returns the value.
        words: what handlers are told of a variable that a member makes, if the program uses it
            elsewhere. By default that is the name of the member's primitive.
    """

    name: str
    members: tuple[int, ...]
    inputs: tuple[Any, ...]
    written: Callable[..., Any]
    words: Mapping[Any, str] = dataclasses.field(default_factory=dict)


Finder = Callable[[Any], Iterable[Group]]

_FINDERS: weakref.WeakKeyDictionary[FunctionType, Finder] = weakref.WeakKeyDictionary()


def found_by(find: Finder) -> Callable[[F], F]:
    """Make a function a target that stands for groups of equations.

    Programs do not call the function. If an interceptor has it as a target, TraceEngine looks for
    its groups, and asks the handler about each: ``handler(call, *values, written, also_used)``.
    ``values`` are those of the group's inputs, ``written`` is ``Group.written``, and ``also_used``
    tells, in words, which values the program uses elsewhere. If there are any, the equations run
    whatever the handler returns; if not, and the handler returns a result, none of them runs or is
    shown to other handlers. Without the target, nothing is looked for.

    Args:
        find: takes a program, a ``jax.extend.core.Jaxpr``, and returns the groups in its equations.
            It is called once for each program, with the bodies of loops and branches, and those of
            functions that other handlers are asked about. It must not change or keep the program.
            What it computes are arrays.

    Returns:
        A decorator of a plain function.

    Raises:
        TargetError: what is decorated is not a plain function.
    """

    def decorate(function: F) -> F:
        if not isinstance(function, FunctionType):
            raise TargetError(
                f"A target of found_by must be a plain function, got {function!r}. Define it with "
                "def."
            )
        _FINDERS[function] = find
        return function

    return decorate


def finder_of(function: Any) -> Finder | None:
    """Return what finds the groups that spell out a function; None for ordinary functions."""
    return _FINDERS.get(function) if isinstance(function, FunctionType) else None


class Found(NamedTuple):
    """A group in a program.

    Attributes:
        site: the target that it spells out.
        also_used: the values that other equations use, in words.
        unused: the numbers of dead equations that use values of the group.
    """

    site: Any
    group: Group
    also_used: tuple[str, ...]
    unused: Sequence[int]


def groups_of(jaxpr: Any, site: Any, find: Finder) -> list[Found]:
    """Return the groups in an open jaxpr that may be computed at once.

    Raises:
        TargetError: the finder returned what is not a group of the jaxpr.
    """
    # A program may be sorted while a primitive is bound, when JAX has no current trace.
    with compat.set_current_trace(compat.eval_trace):
        groups = list(find(jaxpr))
    if not groups:
        return []
    program = _Program(jaxpr)
    for group in groups:
        program.check(group)
    # An effect has to happen where the program has it.
    return [
        Found(site, group, program.also_used(group), program.unused(group))
        for group in groups
        if not any(jaxpr.eqns[i].effects for i in group.members)
    ]


class _Program:
    """What makes and uses the variables of a jaxpr, found once for all of its groups."""

    def __init__(self, jaxpr: Any):
        self._eqns = jaxpr.eqns
        self._results = frozenset(_variables(jaxpr.outvars))
        self._needed = compat.used_equations(jaxpr)
        self._makers: dict[Any, int] = dict.fromkeys(compat.inputs_of(jaxpr), -1)
        self._readers: dict[Any, list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            self._makers.update(dict.fromkeys(eqn.outvars, i))
            for var in _variables(eqn.invars):
                self._readers.setdefault(var, []).append(i)

    def check(self, group: Group) -> None:
        """Raise TargetError unless a group is one of this jaxpr."""
        eqns, places = self._eqns, [*group.members]
        if not places or sorted({*places}) != places or places[0] < 0 or places[-1] >= len(eqns):
            problem = (
                f"members must be numbers of the {len(eqns)} equations, in order, got {places}"
            )
        elif len(eqns[places[-1]].outvars) != 1:
            problem = f"last member must have one result, got {len(eqns[places[-1]].outvars)}"
        elif not all(self._is_known(x, places) for x in group.inputs):
            problem = "inputs must be variables from before its last member that no member makes"
        else:
            return
        raise TargetError(f"A group's {problem}. Mend the finder of {group.name!r}.")

    def _is_known(self, var: Any, members: Sequence[int]) -> bool:
        if type(var) is compat.Literal or var not in self._makers:
            return False
        maker = self._makers[var]
        return maker < members[-1] and maker not in members

    def also_used(self, group: Group) -> tuple[str, ...]:
        """Return the values in between that the program uses elsewhere, in words."""
        found = [
            (i, group.words.get(var, f"a result of {self._eqns[maker].primitive.name}"))
            for maker, var in self._between(group)
            for i in self._uses(var)
            if i not in group.members
        ]
        return tuple(dict.fromkeys(words for _, words in sorted(found, key=lambda use: use[0])))

    def _uses(self, var: Any) -> list[int]:
        """Return the equations that use a value, if anything needs these; the results come last."""
        needed = [i for i in self._readers.get(var, ()) if self._needed[i]]
        return [*needed, len(self._eqns)] if var in self._results else needed

    def unused(self, group: Group) -> list[int]:
        """Return the dead equations that use values of the group."""
        found, stack = set[int](), [var for _, var in self._between(group)]
        while stack:
            for i in self._readers.get(stack.pop(), ()):
                if not self._needed[i] and i not in found and i not in group.members:
                    found.add(i)
                    stack += self._eqns[i].outvars
        return sorted(found)

    def _between(self, group: Group) -> list[tuple[int, Any]]:
        """Return the variables that members make for each other, with the numbers of these."""
        return [(i, var) for i in group.members[:-1] for var in self._eqns[i].outvars]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if type(atom) is not compat.Literal]
