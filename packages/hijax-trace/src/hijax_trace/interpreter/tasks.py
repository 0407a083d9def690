"""Tasks: what is to be done with each equation of a jaxpr."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from interception_core.engine_api import AHEAD, SETTLED

from .. import compat
from ..dataflow.holders import CUSTOM_CALLS, Holder, holder_of
from ..patterns.find import FINDERS, contractions
from ..patterns.pattern import Group
from ..staging.mapped import mapped_in
from ..staging.marker import Marker, marker_in, marker_of
from ..state.held import is_held
from .frames import Key, Numbers
from .hi_prims import Expansions

OURS = "jaxtap."
"""Begins all name scopes that are no part of the program."""
WITHIN = "jaxtap.within."
"""Begins the name scope of a function's operations whose handler was asked early."""
_NOTHING: frozenset[str] = frozenset()


class Do(enum.Enum):
    """What is to be done with an equation."""

    PASS = enum.auto()
    """Make it again as it is."""
    ASK = enum.auto()
    """Ask the handler of its primitive."""
    MARKER = enum.auto()
    """Ask the handler of the function whose call it stands for."""
    OTHERS = enum.auto()
    """Make it again as a marker: another interceptor's."""
    ENTER = enum.auto()
    """Make it again with what it holds tapped."""
    CUSTOM = enum.auto()
    """The same, for the call of a function with rules of its own."""
    MAPPED = enum.auto()
    """Map what it was before it met vmap, with that tapped."""
    KEPT = enum.auto()
    """Make it of what it was before it met a derivative, with that tapped."""
    LATER = enum.auto()
    """Make nothing: the last equation of its group decides."""
    GROUP = enum.auto()
    """Ask the handler of the function that the equations of its group write out."""
    HELD = enum.auto()
    """Take an array from the proxy that the program carries."""


class Task(NamedTuple):
    """One equation of a plan.

    Attributes:
        eqn: the equation.
        do: what to do with it.
        simple: whether it may be appended to a jaxpr without running any rule.
        inlined: whether it is a call that JAX puts the body of into a jaxpr.
        marker: the marker that it is, if it is one.
        stack: its name stack, without the scopes that are ours.
        scopes: the names of its scopes.
        within: the names of the functions, asked early but let run, that it is a part of.
        settled: whether a transformation or a handler left it behind; see ``early``.
        unused: whether it was computed ahead, and nothing uses it: no handler is asked.
        gathered: the group that it is the last equation of.
    """

    eqn: Any
    do: Do
    simple: bool
    inlined: bool
    marker: Marker | None
    stack: Any
    scopes: Sequence[str]
    within: frozenset[str]
    settled: bool
    unused: bool = False
    gathered: Gathered | None = None


class Gathered(NamedTuple):
    """A group of equations whose handler is asked.

    Attributes:
        site: what they write out.
        group: the group.
        tasks: what is done where the handler leaves them.
    """

    site: Any
    group: Group
    tasks: Sequence[Task]


class Tasks:
    """The tasks for one interceptor; each is made once.

    Args:
        primitives: the primitives that it targets, with names and handlers.
        owner: its markers are asked, those of others kept.
        expansions: what HiPrims are in other operations.
        functions: the sites of the functions that it targets.
    """

    def __init__(
        self,
        primitives: Mapping[Any, tuple[str, Any]],
        owner: Hashable,
        expansions: Expansions,
        functions: Iterable[Any] = (),
    ):
        self._finders = [(site, find) for site in functions if (find := _finder(site.subject))]
        self._expansions = expansions
        self._primitives = primitives
        self._asked = frozenset(primitives) | frozenset(CUSTOM_CALLS)
        self._owner = owner
        self._known: weakref.WeakKeyDictionary[Any, tuple[list[Task], bool]] = (
            weakref.WeakKeyDictionary()
        )

    def tasks(self, jaxpr: Any) -> list[Task]:
        """Return what to do with the equations of a jaxpr."""
        return self._plan(jaxpr)[0]

    def wants(self, jaxpr: Any) -> bool:
        """Return whether there is anything in it, at any depth, that is not just passed."""
        return self._plan(jaxpr)[1]

    def holder(self, primitive: Any, params: dict[str, Any]) -> Holder | None:
        """Return how to take an equation apart, or None if it holds no part of the program."""
        if primitive is not compat.call_hi_primitive_p:
            return holder_of(primitive, params)
        expansion = self._expansions.of(params["_prim"])
        return None if expansion is None else expansion.holder()

    def enters(self, primitive: Any, params: dict[str, Any], operands: int) -> bool:
        """Return whether a primitive holds anything that is not just passed."""
        holder = self.holder(primitive, params)
        if holder is None:
            return False
        return any(self.wants(body.jaxpr) for body in holder.bodies(params, operands))

    def wants_call(self, primitive: Any, params: dict[str, Any], operands: int) -> bool:
        """Return whether a primitive that is about to be bound is not just passed."""
        if primitive in self._primitives or self.enters(primitive, params, operands):
            return True
        marker = marker_in(primitive, params)
        return marker is not None and marker.owner == self._owner

    def counted(self, eqn: Any) -> dict[Key, int]:
        """Return how many operations an equation is, at most: if all is let run."""
        task = self.task(eqn)
        base = tuple(task.scopes)
        if task.settled or task.do is Do.PASS:
            return {}
        counts = Numbers()
        if task.do is Do.ASK:
            counts.next("/".join(base), "", self._primitives[eqn.primitive][0])
        elif task.marker is not None:
            counts.next("/".join(base), "", task.marker.op_name)
        for jaxpr, label in self._bodies(eqn):
            for inner in compat.open_of(jaxpr).eqns:
                for (path, own, name), number in self.counted(inner).items():
                    path = "/".join(filter(None, (*base, path)))
                    counts.add({(path, own or label, name): number})
        return counts

    def _bodies(self, eqn: Any) -> Iterator[tuple[Any, str]]:
        """Yield the programs that an equation holds, with their labels."""
        mapped = mapped_in(eqn.primitive, eqn.params)
        if mapped is not None:
            yield mapped.jaxpr, ""
        elif eqn.primitive in CUSTOM_CALLS:
            yield eqn.params["call_jaxpr"], ""
        elif (holder := self.holder(eqn.primitive, eqn.params)) is not None:
            for body in holder.bodies(eqn.params, compat.operand_count(eqn)):
                yield body.jaxpr, body.label

    def _plan(self, jaxpr: Any) -> tuple[list[Task], bool]:
        jaxpr = compat.open_of(jaxpr)
        plan = self._known.get(jaxpr)
        if plan is None:
            tasks = _without_unused(jaxpr, [self.task(eqn) for eqn in jaxpr.eqns])
            for site, find in self._finders:
                tasks = _gathered(tasks, site, find(jaxpr))
            wanted = any(
                task.do is not Do.PASS or task.stack is not task.eqn.source_info.name_stack
                for task in tasks
            )
            plan = self._known[jaxpr] = tasks, wanted
        return plan

    def task(self, eqn: Any) -> Task:
        """Return what to do with one equation, staged or being staged."""
        primitive, mapped = eqn.primitive, mapped_in(eqn.primitive, eqn.params)
        # JAX's rule for the call, or an engine within it, has put its own scopes there.
        stack = eqn.source_info.name_stack if mapped is None else mapped.stack
        scopes: Sequence[str] = ()
        settled, within = False, _NOTHING
        if len(stack):
            scopes = compat.scopes_of(stack)
            if any(name.startswith(OURS) for name in scopes):
                scopes, settled, within, stack = _cleaned(scopes, stack)
        where = (stack, scopes, within, settled)
        simple = compat.can_append(eqn)
        inlined = compat.is_inlined(primitive, eqn.params)
        if primitive is compat.kept_p:
            # JAX's rules, which settle what they leave, have made it of the program.
            return Task(eqn, Do.KEPT, False, False, None, stack, scopes, within, False)
        if is_held(primitive, eqn.params):
            return Task(eqn, Do.HELD, simple, inlined, None, *where)
        if settled:
            return Task(eqn, Do.PASS, simple, inlined, None, *where)
        if primitive not in self._asked and not compat.holds_jaxprs(eqn):
            return Task(eqn, Do.PASS, simple, False, None, *where)
        marker = marker_of(eqn)
        if mapped is not None:
            do = Do.MAPPED
        elif marker is not None:
            do = Do.MARKER if marker.owner == self._owner else Do.OTHERS
        elif primitive in self._primitives:
            do = Do.ASK
        elif primitive in CUSTOM_CALLS:
            do = Do.CUSTOM
        elif self.enters(primitive, eqn.params, compat.operand_count(eqn)):
            do = Do.ENTER
        else:
            do = Do.PASS
        return Task(eqn, do, simple, inlined, marker, *where)


def _without_unused(jaxpr: Any, tasks: list[Task]) -> list[Task]:
    """Mark what a program has computed while it traced a function ahead, and never uses."""
    if not any(map(_is_ahead, tasks)):
        return tasks
    used = compat.used_equations(jaxpr)
    return [
        task._replace(unused=_is_ahead(task) and not is_used)
        for task, is_used in zip(tasks, used, strict=True)
    ]


def _finder(function: Any) -> Any:
    return next((find for pattern, find in FINDERS.items() if pattern is function), None)


def _gathered(tasks: list[Task], site: Any, groups: Iterable[Group]) -> list[Task]:
    """Let the last equation of each group decide for all of it."""
    found = list(tasks)
    for group in groups:
        members = [tasks[i] for i in group.members]
        if not all(map(_can_wait, members)):
            continue
        alone = not group.also_used
        # What uses them and is not used itself is not made.
        for i in (*group.members, *group.unused) if alone else ():
            found[i] = tasks[i]._replace(do=Do.LATER)
        gathered = Gathered(site, group, members if alone else members[-1:])
        found[group.last] = members[-1]._replace(do=Do.GROUP, gathered=gathered)
    return found


def _can_wait(task: Task) -> bool:
    """Return whether an equation may be run later, or not at all."""
    # A contraction that is settled is what handlers have made of one.
    asked = task.settled and contractions(task.eqn) > 0
    return not (asked or task.unused or task.do in (Do.OTHERS, Do.KEPT))


def _is_ahead(task: Task) -> bool:
    # Its stack differs from the equation's if there is a scope of ours.
    stack = task.eqn.source_info.name_stack
    return task.stack is not stack and AHEAD in compat.scopes_of(stack)


def _cleaned(names: Sequence[str], stack: Any) -> tuple[list[str], bool, frozenset[str], Any]:
    """Take our own scopes out of a name stack."""
    settled, within, scopes = False, [], []
    for name in names:
        if name.startswith(SETTLED):
            settled = True
        elif name.startswith(WITHIN):
            within.append(name.removeprefix(WITHIN))
        elif not name.startswith(OURS):
            scopes.append(name)
    ours = {name for name in names if name.startswith(OURS)}
    return scopes, settled, frozenset(within), compat.stack_without(stack, ours)
