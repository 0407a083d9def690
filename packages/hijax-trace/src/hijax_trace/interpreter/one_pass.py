"""One pass over a jaxpr: the values of its variables, and how its equations are made again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .. import compat
from .apart import Derivatives
from .atoms import metadata_of, variable
from .bodies import Entered
from .frames import Around, Frame, Operands
from .session import Session
from .tasks import Task


class Pass:
    """What actions on equations share while a jaxpr is run again.

    Where it is run to build another jaxpr, most equations are appended to that as they are: the
    types of their results are known. Only what depends on a value of another type than the
    original's (a handler may return one that is less weakly typed) is bound, as is everything
    in other traces.

    Attributes:
        session: the call of the wrapped function that this is for.
        frame: what is known of its values.
        values: of variables, as far as they have one.
        appends: whether equations are appended to another jaxpr.
        changed: variables whose value has another type.
        derivatives: of functions that the jaxpr holds, once it is asked for them.
        reinterpret: runs another jaxpr; see ``reinterpret.reinterpret``.
    """

    reinterpret: Callable[..., list[Any]]

    def __init__(
        self, session: Session, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
    ):
        self.session = session
        self.frame = frame
        self.jaxpr = jaxpr
        self.trace = compat.current_trace()
        self._caller = caller
        self._outer = compat.current_stack() if caller is None else caller.name_stack
        self.appends = compat.is_staging(self.trace) and not jaxpr.is_high
        self.derivatives: Derivatives | None = None
        self.changed: set[Any] = set()
        self.values: dict[Any, Any] = {}
        self.write(compat.inputs_of(jaxpr), values)

    def run(self, task: Task) -> None:
        """Make one equation, as its task says."""
        raise NotImplementedError

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Set variables."""
        for var, value in zip(variables, values, strict=True):
            self.values[var] = value
            if self.appends:
                aval = compat.typeof(value)
                if aval is not var.aval and aval != var.aval:
                    self.changed.add(var)

    def again(self, task: Task, eqn: Any, values: Sequence[Any], info: Any) -> None:
        """Make an equation as it is."""
        make = None
        if self.appends:
            make = compat.append if task.simple else compat.inline if task.inlined else None
        changed = self.changed
        if make is None or (changed and not changed.isdisjoint(map(variable, eqn.invars))):
            self.write(eqn.outvars, compat.rebind(eqn, values, info))
        else:
            self.values.update(zip(eqn.outvars, make(self.trace, eqn, values, info), strict=True))

    def emit(self, task: Task, eqn: Any, new: Any, info: Any) -> None:
        """Make an equation with the new program that it holds, of ``enter``."""
        for i, note in new.metadata.items():
            self.frame.metadata[eqn.outvars[i]] = note
        join(self.frame, eqn, new)
        again = eqn.replace(params=new.params)
        if len(new.values) == len(eqn.invars) and not compat.has_effects(new.params):
            self.again(task, again, new.values, info)
        else:
            self.write(eqn.outvars, compat.rebind(again, new.values, info))

    def number(self, task: Task, name: str) -> int:
        """Return the number of a call of a name among those in the same place."""
        frame = self.frame
        return self.session.numbers.next(frame.own_path(task.scopes), frame.label, name)

    def around(self, task: Task, within: frozenset[str], untapped: bool) -> Around:
        """Return what is known around the program that an equation holds."""
        return Around(self.frame, task.scopes, within | task.within, untapped)

    def operands(self, eqn: Any) -> Operands:
        """Return what is known of the operands of an equation."""
        frame = self.frame
        metadata = {}
        if frame.metadata:
            found = [metadata_of(frame, atom) for atom in eqn.invars]
            metadata = {i: note for i, note in enumerate(found) if note}
        origins = [functools.partial(frame.origin, atom) for atom in eqn.invars]
        proxies = {}
        if frame.proxies:
            found = [frame.proxies.get(variable(atom)) for atom in eqn.invars]
            proxies = {i: held for i, held in enumerate(found) if held is not None}
        expressions = [functools.partial(frame.own_expression, atom) for atom in eqn.invars]
        return Operands([atom.aval for atom in eqn.invars], origins, metadata, proxies, expressions)


def join(frame: Frame, eqn: Any, inner: Frame | Entered) -> None:
    """Take over whether anything was replaced in what an equation holds."""
    if inner.replaced:
        frame.replaced.update(eqn.outvars)
    if inner.foreign:
        frame.foreign.update(eqn.outvars)
