"""One pass over a jaxpr: its values and how it makes equations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import compat
from .frames import Frame, Inputs, Place, operands_of
from .lazy import LazyArray, Values
from .session import Around, Session
from .tasks import Task


class Pass:
    """What the actions on equations share while a jaxpr is re-interpreted.

    A pass that builds another jaxpr appends most equations as they are: the types of their results
    are known, so no JAX rule needs to run. It binds an equation only if an operand's type changed
    (a handler's result may be less weakly typed). In other traces every equation is bound, and in
    programs with values of high-level types, which JAX's rules change.

    Args:
        caller: the source of the call that the jaxpr is inlined for, or None.

    Attributes:
        values: the values of variables so far.
        appends: whether equations are appended to another jaxpr.
        changed: variables whose value has another type than the variable.
        derivatives: the ``Derivatives`` in the jaxpr, once an equation asked for them.
        answers: an ``Answers``, if what handlers did may be done again.
        joins: a ``Joins``, if equations may be joined with calls that handlers made.
    """

    def __init__(
        self, session: Session, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
    ):
        self.session = session
        self.frame = frame
        self.jaxpr = jaxpr
        self.trace = compat.current_trace()
        self._caller = caller
        self._outer = compat.current_stack() if caller is None else caller.name_stack
        self.appends = compat.is_staging(self.trace) and not compat.has_high_values(jaxpr)
        self.derivatives: Any = None  # these three are of modules that import this one
        self.answers: Any = None
        self.joins: Any = None
        self.changed: set[Any] = set()
        self.values = Values()
        self.write(compat.inputs_of(jaxpr), values)

    def run(self, task: Task) -> None:
        """Make one equation by the action of its task."""
        raise NotImplementedError

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Set the values of variables."""
        for var, value in zip(variables, values, strict=True):
            if type(value) is LazyArray:  # of the type that the program was staged for
                self.values.later[var] = value
                continue
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
        if make is None or (changed and any(x in changed for x in _variables(eqn.invars))):
            called = self.called(eqn, eqn.params, values)
            self.write(eqn.outvars, compat.rebind(called, values, info))
        else:
            self.values.update(zip(eqn.outvars, make(self.trace, eqn, values, info), strict=True))

    def called(self, eqn: Any, params: Mapping[str, Any], values: Sequence[Any]) -> Any:
        """Return what to bind for an equation: itself, or the call that it does all of.

        JAX keeps the derivative of a call, which equal calls share, and finds that of an equation
        each time: ``x + y`` of many layers takes twice as long to differentiate as an equation.
        """
        call = self.frame.call
        if call is None or eqn is not self.jaxpr.eqns[0]:
            return eqn
        # A handler may have other parameters or operands, also some that JAX refuses.
        own = params is eqn.params or (
            params.keys() == eqn.params.keys()
            and all(params[key] is eqn.params[key] for key in eqn.params)
        )
        alike = list(map(compat.typeof, values)) == [atom.aval for atom in call.invars]
        return call if own and alike else eqn

    def count(self, task: Task, name: str, is_linear: bool = False) -> tuple[str, int]:
        """Count an operation. Return its label and its number; see ``Session.count``."""
        frame = self.frame
        return self.session.count(frame.path(task.scopes), frame.label, name, is_linear)

    def place(
        self, task: Task, within: frozenset[str] | None = None, untapped: bool | None = None
    ) -> Place:
        """Return the place of an equation; by default as its frame says."""
        frame = self.frame
        within = (frame.within if within is None else within) | task.within
        untapped = self.is_untapped(task) if untapped is None else untapped
        return Place(frame, task.scopes, within, untapped)

    def around(
        self, task: Task, within: frozenset[str] | None = None, untapped: bool | None = None
    ) -> Around:
        """Return what is around the programs of an equation; see ``place``."""
        return Around(self.session, self.place(task, within, untapped), self.operands(task.eqn))

    def is_untapped(self, task: Task) -> bool:
        """Return whether no handler is asked about an equation."""
        return self.frame.untapped or task.unused

    def operands(self, eqn: Any) -> Inputs:
        """Return what is known of the operands of an equation."""
        avals = [atom.aval for atom in eqn.invars]
        return operands_of(self.frame, eqn.invars, avals, self.linear(eqn.invars))

    def linear(self, atoms: Sequence[Any]) -> frozenset[int]:
        """Return the numbers of the atoms in which the program must be linear."""
        # Most programs need not be linear in anything.
        numbers = enumerate(atoms) if self.frame.has_linear else ()
        return frozenset([i for i, atom in numbers if self.frame.is_linear(atom)])


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if type(atom) is not compat.Literal]
