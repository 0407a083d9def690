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
    """

    eqn: Any
    do: Do
    simple: bool
    inlined: bool
    marker: Marker | None
    token: str | None


class Plans:
    """The plans for one interceptor; each is made once.

    Args:
        primitives: the primitives that it targets.
        interceptor: its markers are asked, those of others kept.
    """

    def __init__(self, primitives: Iterable[Any], interceptor: Any):
        self._primitives = frozenset(primitives)
        self._asked = self._primitives | frozenset(CUSTOM_CALLS)
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
            steps = [self.step(eqn) for eqn in jaxpr.eqns]
            wanted = any(step.do is not Do.PASS or step.token is not None for step in steps)
            plan = self._plans[jaxpr] = steps, wanted
        return plan

    def step(self, eqn: Any) -> Step:
        """Returns what to do with one equation, staged or being staged."""
        primitive = eqn.primitive
        stack = eqn.source_info.name_stack
        token = None
        if len(stack):
            names = _compat.scopes_of(stack)
            token = next((name for name in names if name.startswith(SETTLED)), None)
        if token is None and primitive not in self._asked and not _compat.holds_jaxprs(eqn):
            return Step(eqn, Do.PASS, _compat.can_append(eqn), False, None, None)
        simple, inlined = _compat.can_append(eqn), _compat.is_inlined(eqn)
        marker = None
        if token is not None:
            do = Do.PASS
        elif (marker := marker_of(eqn)) is not None:
            do = Do.MARKER if marker.interceptor == self._interceptor else Do.OTHERS
        elif primitive in self._primitives:
            do = Do.ASK
        elif primitive in CUSTOM_CALLS:
            do = Do.CUSTOM
        elif self.enters(primitive, eqn.params, _compat.operand_count(eqn)):
            do = Do.ENTER
        else:
            do = Do.PASS
        return Step(eqn, do, simple, inlined, marker, token)
