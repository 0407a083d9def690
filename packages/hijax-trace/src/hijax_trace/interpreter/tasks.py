"""Tasks: what the interpreter does with each equation of a jaxpr."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import compat
from ..dataflow.holders import (
    CUSTOM_CALLS,
    Body,
    Holder,
    called,
    custom_body,
    holder_of,
    is_opaque,
    opaque_call,
)
from ..dataflow.sources import contracts
from ..staging.marker import Marker, marker_in, marker_of
from ..state.restage import is_restoring
from .groups import Found, finder_of, groups_of
from .hi_prims import Expansions
from .op_ids import Key, Numbers, Where, join_path, where_of


class Do(enum.Enum):
    """What the interpreter does with an equation."""

    PASS = enum.auto()
    """Make it again as it is."""
    ASK = enum.auto()
    """Ask the handler of its primitive."""
    MARKER = enum.auto()
    """Ask the handler of the function whose call it stands for."""
    FOREIGN_CALL = enum.auto()
    """Make it again as a marker of another interceptor, with its program tapped."""
    ENTER = enum.auto()
    """Make it again with the programs that it holds tapped."""
    CUSTOM = enum.auto()
    """Do the same with the call of a function that has custom derivative rules."""
    DEFERRED = enum.auto()
    """Tap the operation that JAX mapped or derived, then map or derive that."""
    LATER = enum.auto()
    """Make nothing yet: the last equation of its group decides."""
    GROUP = enum.auto()
    """Ask the handler of the function that the equations of its group spell out."""
    RESTORE = enum.auto()
    """Restore the array of a proxy that the program carries."""


class Task(NamedTuple):
    """What to do with one equation.

    Attributes:
        simple: whether it may be appended to a jaxpr without running any rule.
        inlined: whether it is a call whose body JAX inlines.
        stack: its name stack, without jaxtap's scopes.
        scopes: the names of the scopes in ``stack``.
        within: the names of the functions around it whose handlers were asked early.
        settled: whether a transformation or a handler left it behind; see ``early``.
        unused: whether it was traced ahead and nothing uses it: no handler is asked.
        gathered: the group whose last equation it is.
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
        found: the group.
        tasks: what to do with its equations if the handler leaves them.
    """

    found: Found
    tasks: Sequence[Task]


_Sort = tuple[Do, bool, bool, Marker | None]
"""The first fields of a task, without its equation."""


class Tasks:
    """The tasks for one interceptor, found once for each jaxpr."""

    def __init__(
        self,
        primitives: Mapping[Any, tuple[str, Any]],
        owner: Hashable,
        expansions: Expansions,
        functions: Mapping[Any, tuple[str, Any]] = MappingProxyType({}),
    ):
        self._finders = [(site, find) for site in functions if (find := finder_of(site.subject))]
        asked = (entry for site, entry in functions.items() if site.subject is opaque_call)
        self._opaque = next(asked, None)
        self._expansions = expansions
        self._primitives = primitives
        self._asked = frozenset(primitives) | frozenset(CUSTOM_CALLS)
        self._owner = owner
        self._last: tuple[Any, Where] | None = None
        self._known: weakref.WeakKeyDictionary[Any, tuple[list[Task], bool]] = (
            weakref.WeakKeyDictionary()
        )

    def tasks(self, jaxpr: Any) -> list[Task]:
        """Return what to do with the equations of a jaxpr."""
        return self._plan(jaxpr)[0]

    def wants(self, jaxpr: Any) -> bool:
        """Return whether a jaxpr, at any depth, has more than passed equations."""
        return self._plan(jaxpr)[1]

    def only_asks(self, jaxpr: Any) -> bool:
        """Return whether asking handlers is all that there is to do in a jaxpr, at any depth."""

        def only_asks(task: Task) -> bool:
            eqn = task.eqn
            if task.stack is not eqn.source_info.name_stack or task.settled:
                return False  # its scope is jaxtap's, and is left out
            if task.do is Do.ENTER and eqn.primitive is compat.jit_p:
                return self.only_asks(eqn.params["jaxpr"])
            return task.do is Do.PASS or (task.do is Do.ASK and not compat.holds_jaxprs(eqn))

        return all(map(only_asks, self.tasks(jaxpr)))

    def asked(self, primitive: Any, params: dict[str, Any], operands: int) -> Any:
        """Return name and handler of a targeted primitive; None for others."""
        found = self._primitives.get(primitive)
        if found is None and self._opaque is not None and is_opaque(primitive, params, operands):
            return primitive.name, self._opaque[1]
        return found

    def holder(self, primitive: Any, params: dict[str, Any]) -> Holder | None:
        """Return the holder of an equation, or None."""
        found = holder_of(primitive, params)
        if found is not None or primitive is not compat.call_hi_primitive_p:
            return found
        expansion = self._expansions.of(params["_prim"])
        return None if expansion is None else expansion.holder()

    def enters(self, primitive: Any, params: dict[str, Any], operands: int) -> bool:
        """Return whether a primitive holds a program that ``wants`` is true for."""
        programs = self._programs(primitive, params, operands)
        return any(self.wants(body.jaxpr) for body in programs)

    def _programs(self, primitive: Any, params: dict[str, Any], operands: int) -> Sequence[Body]:
        """Return the programs that an equation holds."""
        if (custom := custom_body(primitive, params, operands)) is not None:
            return [custom]
        holder = self.holder(primitive, params)
        return () if holder is None else holder.bodies(params, operands)

    def wants_call(self, primitive: Any, params: dict[str, Any], operands: int) -> bool:
        """Return whether a primitive that is about to be bound concerns handlers."""
        if primitive in self._primitives or self.enters(primitive, params, operands):
            return True
        marker = marker_in(primitive, params)
        return marker is not None and marker.owner == self._owner

    def counted(self, eqn: Any) -> dict[Key, int]:
        """Return how many operations an equation has, by key."""
        task = self.task(eqn)
        base = join_path(*task.scopes)
        if task.settled or task.do is Do.PASS:
            return {}
        counts = Numbers()
        if task.do is Do.ASK:
            asked = self.asked(eqn.primitive, eqn.params, compat.operand_count(eqn))
            counts.next(base, "", asked[0])
        elif task.marker is not None:
            counts.next(base, "", task.marker.op_name)
        for jaxpr, label in self._bodies(eqn):
            for inner in compat.open_of(jaxpr).eqns:
                for (path, own, name), number in self.counted(inner).items():
                    counts.add({(path, own or label, name): number}, base)
        return counts

    def _bodies(self, eqn: Any) -> Iterator[tuple[Any, str]]:
        """Yield the programs that an equation holds, with their labels."""
        if eqn.primitive is compat.deferred_p:
            if not eqn.params["function"].is_derived:
                yield eqn.params["function"].program.jaxpr, ""
            return
        for body in self._programs(eqn.primitive, eqn.params, compat.operand_count(eqn)):
            yield body.jaxpr, body.label

    def _plan(self, jaxpr: Any) -> tuple[list[Task], bool]:
        jaxpr = compat.open_of(jaxpr)
        plan = self._known.get(jaxpr)
        if plan is None:
            sorts: dict[Hashable, _Sort] = {}
            tasks = _without_unused(jaxpr, [self.task(eqn, sorts) for eqn in jaxpr.eqns])
            for site, find in self._finders:
                tasks = _gathered(tasks, groups_of(jaxpr, site, find))
            wanted = any(
                task.do is not Do.PASS or task.stack is not task.eqn.source_info.name_stack
                for task in tasks
            )
            plan = self._known[jaxpr] = tasks, wanted
        return plan

    def task(self, eqn: Any, sorts: dict[Hashable, _Sort] | None = None) -> Task:
        """Return what to do with one equation, staged or being staged."""
        sort = key = None
        if sorts is not None:
            # Calls of one function on equal types share its jaxpr, and those that were staged as
            # one before it, their parameters.
            params = eqn.params
            key = None if type(params) is compat.SharedParams else compat.call_key(eqn)
            key = key or (eqn.primitive, id(params))
            sort = sorts.get(key)
        if sort is None:
            sort = self._sort(eqn)
            if sorts is not None:
                sorts[key] = sort
        do, simple, inlined, marker = sort
        stack, scopes, within, settled = self._where(eqn.source_info.name_stack)
        if do is Do.DEFERRED:
            # JAX's rules made it, in a scope that settles what they leave. It is not settled.
            return Task(eqn, do, False, False, None, stack, scopes, within, False)
        if settled and do is not Do.RESTORE:
            do, marker = Do.PASS, None
        return Task(eqn, do, simple, inlined, marker, stack, scopes, within, settled)

    def _sort(self, eqn: Any) -> _Sort:
        """Return what to do with an equation unless it is settled."""
        primitive, params, marker = eqn.primitive, eqn.params, None
        simple, inlined = compat.can_append(eqn), compat.is_inlined(primitive, params)
        if primitive is compat.deferred_p:
            if params["function"].program.is_from_handler:  # of an engine inside this one
                do = Do.ENTER if self.enters(primitive, params, len(eqn.invars)) else Do.PASS
            else:
                do = Do.RESTORE if is_restoring(primitive, params) else Do.DEFERRED
        elif primitive not in self._asked and not compat.holds_jaxprs(eqn):
            do, inlined = Do.PASS, False
        elif (marker := marker_of(eqn)) is not None:
            do = Do.MARKER if marker.owner == self._owner else Do.FOREIGN_CALL
        elif self.asked(primitive, params, compat.operand_count(eqn)) is not None:
            do = Do.ASK
        elif custom_body(primitive, params, compat.operand_count(eqn)) is not None:
            do = Do.CUSTOM
        elif self.enters(primitive, params, compat.operand_count(eqn)):
            do = Do.ENTER
        else:
            do = Do.PASS
        return do, simple, inlined, marker

    def _where(self, stack: Any) -> Where:
        """Return what a name stack tells of an equation."""
        # Equations that follow each other share their stack.
        last = self._last
        if last is None or last[0] is not stack:
            last = self._last = stack, where_of(stack)
        return last[1]


def _without_unused(jaxpr: Any, tasks: list[Task]) -> list[Task]:
    """Mark equations that were traced ahead and that nothing uses."""
    # The stacks differ only if jaxtap's scopes were removed.
    ours = [task for task in tasks if task.stack is not task.eqn.source_info.name_stack]
    if not any(map(_is_ahead, ours)):
        return tasks
    used = compat.used_equations(jaxpr)
    # A derivative shares what is made of its operation, so that handlers are asked about an
    # operation of which the program uses the derivative alone, as in ``tangent_solve`` of a root.
    derived = {program_at(task.eqn) for task, is_used in zip(tasks, used, strict=True)
               if is_used and task.do is Do.DEFERRED}  # fmt: skip
    return [
        task._replace(
            unused=_is_ahead(task)
            and not is_used
            and not (task.do is Do.DEFERRED and program_at(task.eqn) in derived)
        )
        for task, is_used in zip(tasks, used, strict=True)
    ]


def program_at(eqn: Any) -> Hashable:
    """Return a key of the program that a deferred equation is made of, and its operands there."""
    program = eqn.params["function"].program
    return program, tuple(map(id, eqn.invars[: len(program.in_avals)]))


def _gathered(tasks: list[Task], groups: Iterable[Found]) -> list[Task]:
    """Let the last equation of each group decide for all of it."""
    result = list(tasks)
    for found in groups:
        places = found.group.members
        members = [tasks[i] for i in places]
        if not all(map(_can_wait, members)):
            continue
        alone = not found.also_used
        # Equations that only dead code needs are not made, either.
        for i in (*places, *found.unused) if alone else ():
            result[i] = tasks[i]._replace(do=Do.LATER)
        gathered = Gathered(found, members if alone else members[-1:])
        result[places[-1]] = members[-1]._replace(do=Do.GROUP, gathered=gathered)
    return result


def _can_wait(task: Task) -> bool:
    """Return whether an equation may be made later, or not at all."""
    # A settled contraction is a handler's result: its handler has decided already.
    asked = task.settled and _contracts(task.eqn)
    if task.do is Do.DEFERRED and task.eqn.params["function"].program.is_differentiated:
        return False
    return not (asked or task.unused or task.do is Do.FOREIGN_CALL)


def _contracts(eqn: Any) -> bool:
    """Return whether an equation is a contraction, or holds one."""
    body = called(eqn)
    if body is None:
        return contracts(eqn.primitive, eqn.params)
    return any(map(_contracts, body.jaxpr.eqns))


def _is_ahead(task: Task) -> bool:
    stack = task.eqn.source_info.name_stack
    return task.stack is not stack and compat.AHEAD in compat.scopes_of(stack)
