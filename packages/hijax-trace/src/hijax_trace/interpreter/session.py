"""Sessions: one call of a wrapped function, from staging to results."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from interception_core import Interceptor
from interception_core.engine_api import Patch, Taps

from ..dataflow.flow import Origin
from ..staging.deferred import Staged
from ..staging.marker import Markers
from ..staging.repeated import context_token
from ..state.restage import Restaged
from ..state.stacks import carried_stacks
from .frames import Frame, Inputs, Place
from .hi_prims import Expansions
from .op_ids import Key, Numbers, OfRule
from .questions import Keys, Memo
from .tasks import Tasks

BY_PATH: weakref.WeakSet[Interceptor] = weakref.WeakSet()
"""The interceptors whose handlers are also asked early in traces of nested functions.

These traces depend on handlers: they are not shared with other interceptors, and differ by module
path. A program is staged so once it was met that a handler can't wait there.
"""


class Tapping:
    """What the calls of one wrapped function share.

    Args:
        rewrap: wraps another function with the same interceptor.
        by_path: whether handlers are asked in traces of nested functions: see ``BY_PATH``.
        observe: makes an observer of what derivative rules stage later.
        reinterpret: the function ``reinterpret.reinterpret``, which imports this module.
        patches: ``watcher.PATCHES``.

    Attributes:
        owner: identifies its markers. Equal for interceptors that share JAX's traces.
        carries_stacks: whether ``carried_stacks`` is a target.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        rewrap: Callable[[Callable[..., Any]], Callable[..., Any]],
        by_path: bool,
        observe: Callable[[Tapping], Any],
        reinterpret: Callable[..., list[Any]],
        patches: Sequence[Patch],
    ):
        self.rewrap = rewrap
        self.by_path = by_path
        self.interceptor = interceptor
        self.reinterpret = reinterpret
        key, path_key = ("staged", interceptor.cache_key), interceptor.resolve_path
        staged = Interceptor(dict(interceptor), key=key, path_key=path_key)
        # Markers are the same whoever asks about them, so interceptors with one key share traces.
        shared = None if by_path else ("staged", interceptor.given_key)
        self.taps = Taps(staged, on_call=_on_call, again=_again, shared_key=shared, patches=patches)
        self.owner = self.taps.key
        self.primitives = self.taps.primitives
        self.functions = self.taps.functions
        self.carries_stacks = any(site.subject is carried_stacks for site in self.functions)
        self._observe = observe
        self.tasks = Tasks(self.primitives, self.owner, Expansions(self.run), self.functions)
        self.memo, self.keys = Memo(), Keys(interceptor.resolve_origin)
        self.markers = Markers(self.owner)
        self.mapped: dict[Hashable, Staged] = {}

    def run(self, fn: Callable[..., Any], args: tuple) -> Any:
        """Call a function while the targets that it calls become markers."""
        if self.taps.holds():
            return fn(*args)
        return self.taps.run(fn, args, {}, observer=self._observe(self))


def _on_call(handler: Callable[..., Any], call: Any, *args: Any, **kwargs: Any) -> Any:
    return call.observer.on_call(handler, call, args, kwargs)


def _again(observer: Any, site: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return observer.again(site, args, kwargs)


def _no_origin(index: int) -> Origin:
    raise AssertionError("The program must be staged before an origin is asked for.")


class Session:
    """One call of a wrapped function.

    Attributes:
        context: stands for JAX's configuration.
        is_observed: whether another engine taps this call from outside. Operations that are
            settled for this engine are settled for that one.
        finished: whether the call is over.
        origin: returns the origin of an input of the wrapped function.
        asked: operations whose handlers were asked early: how many equations the program had
            then, and the operation's key and number.
        made: what was made of each program that meets a derivative; see ``staging.deferred``.
        lacking: the pytree paths of inputs of which nothing is stored; see ``lacking``.
        replaced: the pytree paths of inputs that are arrays, of which values were derived that are
            stored.
        uses_of_lacking: the operations that take values of such inputs: the id, whether a handler
            knows it by that, and the expression of the value.
        rule: the derivative rule that it is for, or None.
    """

    def __init__(
        self, tapping: Tapping, numbers: Numbers | None = None, rule: OfRule | None = None
    ):
        self.tapping = tapping
        self.numbers = Numbers() if numbers is None else numbers
        self.rule = rule
        self.context = context_token()
        self.is_observed = Taps.is_observed()
        self.finished = False
        self.origin: Callable[[int], Origin | None] = _no_origin
        self.asked: list[tuple[int, Key, int]] = []
        self.made: dict[Any, Any] = {}
        self.lacking: frozenset[str] = frozenset()
        self.replaced: frozenset[str] = frozenset()
        self.uses_of_lacking: list[tuple[str, bool, Any]] = []

    @property
    def interceptor(self) -> Interceptor:
        """The targets and their handlers."""
        return self.tapping.interceptor

    def reinterpret(
        self, frame: Frame, jaxpr: Any, values: Sequence[Any], caller: Any = None
    ) -> list[Any]:
        """Re-interpret an open jaxpr; see ``reinterpret.reinterpret``."""
        return self.tapping.reinterpret(self, frame, jaxpr, values, caller)

    def reach(self, position: int) -> None:
        """Count the early operations that come before an equation of the program."""
        while self.asked and self.asked[0][0] <= position:
            _, key, number = self.asked.pop(0)
            self.numbers[key] = max(self.numbers.get(key, 0), number + 1)

    def restaged(self, made: Restaged) -> tuple[Any, list[Any]]:
        """Follow the equations of the program, which was staged again. Return it."""
        starts = made.starts
        self.asked = [
            (starts[place] if place < len(starts) else sys.maxsize, key, number)
            for place, key, number in self.asked
        ]
        return made.jaxpr, made.consts

    def count(self, path: str, label: str, name: str, is_linear: bool = False) -> tuple[str, int]:
        """Count one operation. Return its label, and its number among those of its key.

        Args:
            path: its module path.
            label: the label of the innermost loop or branch around it.
            name: its name.
            is_linear: whether the program must be linear in an operand.
        """
        if self.rule is not None:
            label = self.rule.label_of(self.numbers, (path, label, name), is_linear)
        return label, self.numbers.next(path, label, name)

    def number(self, key: Key, numbers: Numbers | None = None) -> Hashable:
        """Return a key of the ids that operations of ``key`` get, counted from ``numbers``.

        By default from what has been counted so far. Equal keys mean equal ids.
        """
        found = (self.numbers if numbers is None else numbers).get(key, 0)
        # In a rule a number alone does not tell whether the operation is the function's.
        return found if self.rule is None else (found, self.rule.label, self.rule.ends.get(key, 0))

    def counting(self, numbers: Numbers, rule: OfRule | None = None) -> Session:
        """Return a session with other numbers, for a derivative rule."""
        session = Session(self.tapping, numbers, rule)
        session.origin, session.made = self.origin, self.made
        session.lacking, session.uses_of_lacking = self.lacking, self.uses_of_lacking
        return session

    def finish(self) -> None:
        """End the call."""
        self.finished = True
        self.made.clear()


class Around(NamedTuple):
    """What is around the programs that an equation holds."""

    session: Session
    place: Place
    operands: Inputs
