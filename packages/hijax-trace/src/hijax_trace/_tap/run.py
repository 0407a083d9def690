"""A run: one call of a wrapped function, from staging it to running it again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from interception_core import Interceptor, Taps

from .. import _compat
from .bodies import custom, enter
from .early import Early
from .frames import Numbers
from .marker import Markers, is_plain
from .memo import Memo
from .plan import Plans


class Mode(NamedTuple):
    """How a program has to be staged; see ``early``.

    Attributes:
        early: whether handlers are asked meanwhile.
        by_path: whether they are in the traces of nested functions too, which are then told apart
            by module path.
    """

    early: bool = False
    by_path: bool = False


_MODES: dict[Hashable, Mode] = {}
"""The modes other than the first, by interceptor: equal ones share what JAX has traced."""


def mode_of(interceptor: Interceptor) -> Mode:
    """Returns how programs are staged for an interceptor."""
    return _MODES.get(interceptor.cache_key, Mode())


def widen_mode(interceptor: Interceptor, nested: bool) -> None:
    """Lets handlers be asked early, from now on; in the traces of nested functions too."""
    by_path = nested or mode_of(interceptor).by_path
    _MODES[interceptor.cache_key] = Mode(True, by_path)


class Tapping:
    """What the runs of one wrapped function share.

    Args:
        interceptor: the targets and their handlers.
        rewrap: wraps another function with the same interceptor.
        mode: see ``Mode``.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        rewrap: Callable[[Callable[..., Any]], Callable[..., Any]],
        mode: Mode,
    ):
        self.rewrap = rewrap
        self.mode = mode
        self.interceptor = interceptor
        path_key = interceptor.resolve_path if mode.by_path else _no_path
        staged = Interceptor(
            dict(interceptor), key=("staged", interceptor.cache_key), path_key=path_key
        )
        self.taps = Taps(staged, on_call=_on_call)
        self.primitives = self.taps.primitives
        self.functions = self.taps.functions
        self.plans = Plans(self.primitives, interceptor)
        self.memo = Memo(interceptor.resolve_origin)
        self.markers = Markers(interceptor)


@functools.lru_cache(maxsize=256)
def _interned(context: Hashable) -> object:
    """Returns an object that stands for JAX's configuration: one that is hashed fast."""
    return object()


def _no_path(path: str) -> None:
    return None


def _on_call(handler: Callable[..., Any], call: Any, *args: Any, **kwargs: Any) -> Any:
    return call.observer.on_call(handler, call, args, kwargs)


class Run:
    """One call of a wrapped function. Sees to what happens while it is staged.

    Args:
        tapping: what the runs share.
        numbers: the operations so far.
    """

    def __init__(self, tapping: Tapping, numbers: Numbers | None = None):
        self.tapping = tapping
        self.numbers = Numbers() if numbers is None else numbers
        self.early = Early(self)
        self.context = _interned(_compat.trace_context())
        # What was settled for this engine is so for one around it.
        self.is_observed = bool(getattr(Taps.state(), "observed", False))
        self.finished = False
        self._keeping: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def interceptor(self) -> Interceptor:
        """The targets and their handlers."""
        return self.tapping.interceptor

    def on_call(
        self, handler: Callable[..., Any], call: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Called in place of a function's handler while the program is staged."""
        if not _compat.is_staging(_compat.current_trace()) or not is_plain((args, kwargs)):
            return self.early.call(handler, call, args, kwargs)
        return self.tapping.markers.stage(
            self.context, call.op_name, call.site, call.function, self._kept(call), args, kwargs
        )

    def _kept(self, call: Any) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> Any:
            self.keep(_compat.current_trace())
            return call.let_run(*args, **kwargs)

        return body

    def keep(self, trace: Any) -> None:
        """Lets ``trace`` keep the calls of jitted functions that JAX would inline.

        They are inlined when the program is run again. Until then they are one equation that
        JAX knows already: its derivative, too, is made once for all such calls.
        """
        self._keeping.add(trace)

    def keeps(self, trace: Any) -> bool:
        """Returns whether ``trace`` does."""
        return trace in self._keeping

    def bind(
        self, path: str, trace: Any, primitive: Any, values: Any, params: dict[str, Any]
    ) -> Any:
        """Called with what meets a transformation while the program is staged."""
        return self.early.bind(path, trace, primitive, values, params)

    # Methods, so that ``rerun``, which ``bodies`` calls, can call them without importing it.
    enter = enter
    custom = custom

    def counting(self, numbers: Numbers) -> Run:
        """Returns a run of its own for what happens later, or instead."""
        return Run(self.tapping, numbers)
