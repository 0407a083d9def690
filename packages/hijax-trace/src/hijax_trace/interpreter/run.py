"""A run: one call of a wrapped function, from staging it to running it again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from interception_core import Interceptor
from interception_core.engine_api import AHEAD, Taps, known_ahead, settled, unknown_ahead

from .. import _compat
from ..staging.mapped import Staged, can_map, is_being_mapped, map_call, staged
from ..staging.marker import NUMBERS, NUMPY, Markers, Packed, is_plain, key_of
from .bodies import custom, enter
from .early import Early
from .frames import Numbers, Origin
from .memo import Memo
from .plan import Plans


class Mode(NamedTuple):
    """How a program has to be staged; see ``early``.

    Attributes:
        early: whether handlers are asked meanwhile.
        by_path: whether the traces of nested functions depend on handlers too: they are then
            the interceptor's alone, and told apart by module path.
    """

    early: bool = False
    by_path: bool = False


_MODES: weakref.WeakKeyDictionary[Interceptor, Mode] = weakref.WeakKeyDictionary()
"""The modes other than the first, by interceptor."""


def mode_of(interceptor: Interceptor) -> Mode:
    """Returns how programs are staged for an interceptor."""
    return _MODES.get(interceptor, Mode())


def widen_mode(interceptor: Interceptor, nested: bool) -> None:
    """Lets handlers be asked early, from now on; in the traces of nested functions too."""
    by_path = nested or mode_of(interceptor).by_path
    _MODES[interceptor] = Mode(True, by_path)


class Tapping:
    """What the runs of one wrapped function share.

    Args:
        interceptor: the targets and their handlers.
        rewrap: wraps another function with the same interceptor.
        mode: see ``Mode``.

    Attributes:
        owner: what tells its markers from others': equal for those that share JAX's traces.
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
        key, path_key = ("staged", interceptor.cache_key), interceptor.resolve_path
        staged = Interceptor(dict(interceptor), key=key, path_key=path_key)
        # A staged program has marks of what is to be asked, whoever asks.
        shared = None if mode.by_path else ("staged", interceptor.given_key)
        self.taps = Taps(staged, on_call=_on_call, shared_key=shared)
        self.owner = self.taps.key
        self.primitives = self.taps.primitives
        self.functions = self.taps.functions
        self.plans = Plans(self.primitives, self.owner)
        self.memo = Memo(interceptor.resolve_origin)
        self.markers = Markers(self.owner)
        self.mapped: dict[Hashable, Staged] = {}


@functools.lru_cache(maxsize=256)
def _interned(context: Hashable) -> object:
    """Returns an object that stands for JAX's configuration: one that is hashed fast."""
    return object()


def _no_origin(index: int) -> Origin:
    raise AssertionError("the program has not been staged yet")


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
        self.origin: Callable[[int], Origin] = _no_origin
        self._keeping: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def interceptor(self) -> Interceptor:
        """The targets and their handlers."""
        return self.tapping.interceptor

    def on_call(
        self, handler: Callable[..., Any], call: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Called in place of a function's handler while the program is staged."""
        if is_plain((args, kwargs)):
            trace = _compat.current_trace()
            if _compat.is_staging(trace):
                return self._stage(call, args, kwargs)
            packed = Packed((args, kwargs), ())
            if can_map(trace, packed.arrays):
                return self._map(call, packed)
            known = known_ahead(trace, packed.arrays)
            if known is not None:
                args, kwargs = packed.build(known)
                with _compat.set_current_trace(_compat.parent_trace(trace)), settled(AHEAD):
                    return self.on_call(handler, call, args, kwargs)
        if any(map(unknown_ahead, jax.tree.leaves((args, kwargs)))):
            return NotImplemented
        return self.early.call(handler, call, args, kwargs)

    def _stage(self, call: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.tapping.markers.stage(
            self.context, call.op_name, call.site, call.function, self._kept(call), args, kwargs
        )

    def _map(self, call: Any, packed: Packed) -> Any:
        """Stages the call of a function under the program's own vmap."""
        values, key = packed.arrays, key_of(self.context, call.site, packed)
        found = None if key is None else self.tapping.mapped.get(key)
        if found is None:
            results: Packed | None = None

            def flat(*arrays: Any) -> list[Any]:
                nonlocal results
                args, kwargs = packed.build(arrays)
                results = Packed(self._stage(call, args, kwargs), NUMPY + NUMBERS)
                return results.forget()

            found = staged(call.op_name, flat, values)._replace(results=results)
            if key is not None and not found.more:
                self.tapping.mapped[key] = found
        return found.results.build(map_call(call.op_name, found, values))

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
        if is_being_mapped(primitive, params):
            return NotImplemented
        values = list(values)
        if not self.tapping.plans.wants_call(primitive, params, len(values)):
            return NotImplemented
        if any(map(unknown_ahead, values)):
            return NotImplemented
        if not can_map(trace, values):
            return self.early.bind(path, trace, primitive, values, params)

        def again(*values: Any) -> Any:
            found = primitive.bind(*values, **primitive.get_bind_params(params))
            return found if primitive.multiple_results else [found]

        with _compat.set_current_trace(trace):
            call = staged(primitive.name, again, values)
            results = map_call(primitive.name, call, values)
        return results if primitive.multiple_results else results[0]

    # Methods, so that ``rerun``, which ``bodies`` calls, can call them without importing it.
    enter = enter
    custom = custom

    def meet_tapped(self) -> None:
        """Called where the program calls a function that is wrapped itself.

        Whether that is tapped once more depends on the interceptor: the traces are its own.
        """
        if not self.tapping.mode.by_path:
            self.early.meet(nested=True)

    def counting(self, numbers: Numbers) -> Run:
        """Returns a run of its own for what happens later, or instead."""
        return Run(self.tapping, numbers)
