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
        group: the group.
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
    for group in groups:
        _check(jaxpr, group)
    # An effect has to happen where the program has it.
    return [
        Found(site, group, *_uses(jaxpr, group))
        for group in groups
        if not any(jaxpr.eqns[i].effects for i in group.members)
    ]


def _check(jaxpr: Any, group: Group) -> None:
    eqns, places = jaxpr.eqns, [*group.members]
    if not places or sorted({*places}) != places or places[0] < 0 or places[-1] >= len(eqns):
        problem = f"members must be numbers of the {len(eqns)} equations, in order, got {places}"
    elif len(eqns[places[-1]].outvars) != 1:
        problem = f"last member must have one result, got {len(eqns[places[-1]].outvars)}"
    elif not all(_is_known(x, jaxpr, places) for x in group.inputs):
        problem = "inputs must be variables from before its last member that no member makes"
    else:
        return
    raise TargetError(f"A group's {problem}. Mend the finder of {group.name!r}.")


def _is_known(var: Any, jaxpr: Any, members: Sequence[int]) -> bool:
    """Return whether a value is known before the last member, without any member."""
    others = set(range(members[-1])).difference(members)
    makers = (jaxpr.eqns[i].outvars for i in others)
    return any(var is x for made in (compat.inputs_of(jaxpr), *makers) for x in made)


def _uses(jaxpr: Any, group: Group) -> tuple[tuple[str, ...], list[int]]:
    """Return the values that are used elsewhere in words, and the dead equations that use any."""
    inside = set(group.members)
    made = {var: i for i in group.members[:-1] for var in jaxpr.eqns[i].outvars}
    used: dict[Any, None] = {}
    unused: list[int] = []
    in_vain: set[Any] = set()
    needed = compat.used_equations(jaxpr)
    for i, eqn in enumerate(jaxpr.eqns):
        found = [] if i in inside else _variables(eqn.invars)
        if needed[i]:
            used.update((var, None) for var in found if var in made)
        elif any(var in made or var in in_vain for var in found):
            unused.append(i)
            in_vain.update(eqn.outvars)
    used.update((var, None) for var in _variables(jaxpr.outvars) if var in made)
    words = [
        group.words.get(var, f"a result of {jaxpr.eqns[made[var]].primitive.name}") for var in used
    ]
    return tuple(dict.fromkeys(words)), unused


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if type(atom) is not compat.Literal]
