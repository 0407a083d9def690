"""Interpreter: runs a staged program again, operation by operation, asking the handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import compat
from . import asking, deriving, entering, moving
from .atoms import carry, hand_on
from .frames import Frame
from .one_pass import Pass
from .session import Session
from .tasks import Do, Task


def reinterpret(
    session: Session, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
) -> list[Any]:
    """Run a jaxpr in the current trace.

    Args:
        session: the call of the wrapped function that this is for.
        frame: what is known of its values.
        jaxpr: the jaxpr, open.
        values: of its constants and arguments.
        caller: the source of the call in whose place it is run. Its equations then have that
            instead of their own: JAX shares the jaxprs of equal calls.

    Returns:
        Its results.
    """
    return Interpreter(session, frame, jaxpr, values, caller).results()


class Interpreter(Pass):
    """A pass that makes each equation by the action of its task."""

    reinterpret = staticmethod(reinterpret)

    def results(self) -> list[Any]:
        """Run the equations."""
        env, literal, frame = self.values, compat.Literal, self.frame
        # What is staged costs nothing to keep; arrays are let go as soon as they can be.
        forget = {} if compat.is_staging(self.trace) else compat.forgettable(self.jaxpr)
        tasks = self.session.tapping.tasks.tasks(self.jaxpr)
        if any(task.do is Do.GROUP for task in tasks):
            forget = {}  # groups are run later than they are written
        for position, task in enumerate(tasks):
            if frame.is_program:
                self.session.reach(position)
            if task.do is not Do.LATER:
                self.run(task)
            for var in forget.get(task.eqn, ()):
                env.pop(var, None)
        return [a.val if type(a) is literal else env[a] for a in self.jaxpr.outvars]

    def run(self, task: Task) -> None:
        """Run one equation."""
        eqn, frame, outer = task.eqn, self.frame, self._outer
        # The last of a group may have operands that are made if its handler leaves it.
        atoms = () if task.do is Do.GROUP else eqn.invars
        values = [a.val if type(a) is compat.Literal else self.values[a] for a in atoms]
        stack = task.stack
        if (task.settled or task.unused) and self.session.is_observed:
            stack = eqn.source_info.name_stack
        if len(outer):
            stack = outer + stack if len(stack) else outer
        info = compat.info_of(eqn, self._caller, stack)
        if frame.proxies and moving.moves(self, task, values, info):
            pass
        elif task.do is Do.PASS:
            self.again(task, eqn, values, info)
        else:
            untapped, frame.untapped = frame.untapped, frame.untapped or task.unused
            _ACTIONS[task.do](self, task, values, info)
            frame.untapped = untapped
        if (frame.metadata or frame.proxies) and compat.holds_jaxprs(eqn):
            hand_on(frame, eqn)
        if frame.proxies:
            carry(frame, eqn)


_ACTIONS: dict[Do, Callable[[Pass, Task, list[Any], Any], None]] = {
    Do.ASK: asking.ask,
    Do.MARKER: asking.ask_of_function,
    Do.GROUP: asking.ask_of_group,
    Do.ENTER: entering.enter_held,
    Do.OTHERS: entering.enter_marker,
    Do.CUSTOM: entering.enter_custom,
    Do.MAPPED: deriving.make_mapped,
    Do.KEPT: deriving.make_kept,
    Do.HELD: moving.held,
}
