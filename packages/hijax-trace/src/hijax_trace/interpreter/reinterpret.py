"""Re-interpretation: goes through a staged program, equation by equation, and asks handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import compat
from ..proxy.carrier import Carrier
from . import asking, custom, deriving, entering, proxy_equations
from .answers import Answers
from .frames import Frame
from .joins import Joins
from .lacking import note_use, restore_derived
from .one_pass import Pass
from .session import Session
from .tasks import Do, Task


def reinterpret(
    session: Session, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
) -> list[Any]:
    """Make a jaxpr's equations again, as handlers want them.

    Args:
        caller: the source of the call that the jaxpr is inlined for, or None. Its equations get
            this source: JAX shares the jaxpr of equal calls, so their own may be another call's.
    """
    return Interpreter(session, frame, jaxpr, values, caller).results()


class Interpreter(Pass):
    """A pass that makes each equation by the action of its task."""

    _has_carriers = False  # results inherit them from operands, so the inputs decide

    def results(self) -> list[Any]:
        """Make the equations. Return the jaxpr's results."""
        env, literal, frame = self.values, compat.Literal, self.frame
        # Tracers cost nothing to keep. Concrete arrays are freed after their last use.
        forget = {} if compat.is_staging(self.trace) else compat.forgettable(self.jaxpr)
        tasks = self.session.tapping.tasks.tasks(self.jaxpr)
        # Lists, because a generator is one more call for each of its items.
        self._has_carriers = Carrier in [type(held) for held in frame.proxies.values()]
        # An engine around this one must see each operation.
        if self.appends and not self.session.is_observed:
            self.joins = Joins(self)
            if self.session.interceptor.is_pure and not self._has_carriers:
                self.answers = Answers(self)
        if Do.GROUP in [task.do for task in tasks]:
            forget = {}  # the last equation of a group needs the operands of all
        session, is_program = self.session, frame.is_program
        for position, task in enumerate(tasks):
            if is_program and session.asked:
                session.reach(position)
            if task.do is not Do.LATER:
                self.run(task)
            for var in forget.get(task.eqn, ()) if forget else ():
                env.pop(var, None)
        self.answers = self.joins = None  # they refer to this: all of it is freed at once now
        return [a.val if type(a) is literal else env[a] for a in self.jaxpr.outvars]

    def run(self, task: Task) -> None:
        """Make one equation by the action of its task."""
        eqn, frame, outer = task.eqn, self.frame, self._outer
        stack = task.stack
        # An engine around this one must see that the equation is settled.
        if (task.settled or task.unused) and self.session.is_observed:
            stack = eqn.source_info.name_stack
        if outer.stack:
            stack = outer + stack if stack.stack else outer
        info = compat.info_of(eqn, self._caller, stack)
        if task.do is Do.MARKER and self.answers is not None and self.answers.again(task, info):
            return
        # Operands of a group's last equation are only made if the handler leaves the group.
        atoms = () if task.do is Do.GROUP else eqn.invars
        values = [a.val if type(a) is compat.Literal else self.values[a] for a in atoms]
        if (frame.proxies and proxy_equations.make(self, task, values, info)) or self._is_joined(
            task, values, info
        ):
            pass
        elif task.do is Do.PASS:
            self.again(task, eqn, values, info)
        else:
            _ACTIONS[task.do](self, task, values, info)
        known = frame.metadata or frame.proxies
        # A handler's results are not the operands that the original returns.
        if known and compat.holds_jaxprs(eqn) and not frame.from_handler.issuperset(eqn.outvars):
            proxy_equations.forward(frame, eqn)
        if self._has_carriers:
            proxy_equations.carry(frame, eqn)
            if self.session.lacking:
                restore_derived(self, eqn)
                note_use(self.session, frame, task)

    def _is_joined(self, task: Task, values: Sequence[Any], info: Any) -> bool:
        """Make an equation by the call that made one of its operands, if there is one."""
        # A function with a derivative rule may be relu.
        joins = self.joins if task.do is Do.PASS or task.do is Do.CUSTOM else None
        return (
            joins is not None and bool(self.frame.from_handler) and joins.make(task, values, info)
        )


_ACTIONS: dict[Do, Callable[[Pass, Task, list[Any], Any], None]] = {
    Do.ASK: asking.ask,
    Do.MARKER: asking.ask_of_function,
    Do.GROUP: asking.ask_of_group,
    Do.ENTER: entering.enter,
    Do.FOREIGN_CALL: entering.enter_marker,
    Do.CUSTOM: custom.enter_custom,
    Do.DEFERRED: deriving.make_deferred,
    Do.RESTORE: proxy_equations.restore,
}
