"""Plans: what is to be done with each equation of a jaxpr."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from interception_core import SETTLED

from .. import _compat
from .forms import CUSTOM_CALLS, form_of
from .marker import Marker, marker_of


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


class Step(NamedTuple):
    """One equation of a plan.

    Attributes:
        eqn: the equation.
        do: what to do with it.
        simple: whether it may be appended to a jaxpr without running any rule.
        inlined: whether it is a call that JAX puts the body of into a jaxpr.
        marker: the marker that it is, if it is one.
        token: for what a transformation left behind, see ``early``: which.
        dead: the variables that nothing needs after it.
    """

    eqn: Any
    do: Do
    simple: bool
    inlined: bool
    marker: Marker | None
    token: str | None
    dead: tuple[Any, ...]


class Plans:
    """The plans for one interceptor; each is made once.

    Args:
        primitives: the primitives that it targets.
        interceptor: its markers are asked, those of others kept.
    """

    def __init__(self, primitives: Iterable[Any], interceptor: Any):
        self._primitives = frozenset(primitives)
        self._interceptor = interceptor
        self._plans: weakref.WeakKeyDictionary[Any, tuple[list[Step], bool]] = (
            weakref.WeakKeyDictionary()
        )

    def steps(self, jaxpr: Any) -> list[Step]:
        """Returns what to do with the equations of a jaxpr."""
        return self._plan(jaxpr)[0]

    def wants(self, jaxpr: Any) -> bool:
        """Returns whether there is anything in it, at any depth, that is not just passed."""
        return self._plan(jaxpr)[1]

    def enters(self, primitive: Any, params: dict[str, Any], operands: int) -> bool:
        """Returns whether a primitive holds anything that is not just passed."""
        form = form_of(primitive, params)
        if form is None:
            return False
        return any(self.wants(body.jaxpr) for body in form.bodies(params, operands))

    def _plan(self, jaxpr: Any) -> tuple[list[Step], bool]:
        jaxpr = _compat.open_of(jaxpr)
        plan = self._plans.get(jaxpr)
        if plan is None:
            last = _compat.last_used(jaxpr)
            steps = [self.step(eqn, last) for eqn in jaxpr.eqns]
            wanted = any(step.do is not Do.PASS or step.token is not None for step in steps)
            plan = self._plans[jaxpr] = steps, wanted
        return plan

    def step(self, eqn: Any, last: dict[Any, Any] | None = None) -> Step:
        """Returns what to do with one equation, staged or being staged."""
        dead: tuple[Any, ...] = ()
        if last is not None:
            used = {*eqn.outvars, *(a for a in eqn.invars if type(a) is not _compat.Literal)}
            dead = tuple(var for var in used if last.get(var, eqn) is eqn)
        simple, inlined = _compat.can_append(eqn), _compat.is_inlined(eqn)
        for name in _compat.scopes_of(eqn.source_info.name_stack):
            if name.startswith(SETTLED):
                return Step(eqn, Do.PASS, simple, inlined, None, name, dead)
        marker = marker_of(eqn)
        if marker is not None:
            do = Do.MARKER if marker.interceptor == self._interceptor else Do.OTHERS
        elif eqn.primitive in self._primitives:
            do = Do.ASK
        elif eqn.primitive in CUSTOM_CALLS:
            do = Do.CUSTOM
        elif self.enters(eqn.primitive, eqn.params, _compat.operand_count(eqn)):
            do = Do.ENTER
        else:
            do = Do.PASS
        return Step(eqn, do, simple, inlined, marker, None, dead)
