"""Taps: finds targets, and runs functions with them tapped."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..interceptor import Handler, Interceptor
from .context import CONTEXT
from .coroutines import run_in
from .jax_taps import ALWAYS, SITES
from .patches import Patch
from .scope import OUTSIDE, Activation, Observer, Scope
from .targets import Resolved

_RESOLVE_LOCK = threading.RLock()

OnCall = Callable[..., Any]
"""Called as ``on_call(handler, call, *args, **kwargs)`` instead of a function's handler, with a
``TappedCall``, in the scope of the call. It returns what a handler may return, and must call
handlers and originals within ``with call.outside():``."""


class Taps:
    """Finds the targets of an interceptor, and runs functions with them tapped.

    Args:
        interceptor: the targets and their handlers. Targets are looked up when they are first
            needed, and again after a module was reloaded.
        disable_jit: whether functions run under ``jax.disable_jit``. Only then are primitives
            patched.
        on_call: called instead of the handlers of functions.
        again: called before ``on_call``, as ``again(observer, site, args, kwargs)`` with the
            arguments as they are given. It returns the result of a call that equals one before,
            or NotImplemented. Such a call has no number.
        shared_key: the key in JAX's caches, together with the targets, for all module paths.
            ``on_call`` and observers must leave the same in traces for all interceptors with that
            key.
        patches: of ``patch_calls``, installed while functions run tapped.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        *,
        disable_jit: bool = False,
        on_call: OnCall | None = None,
        again: Callable[..., Any] | None = None,
        shared_key: Hashable = None,
        patches: Sequence[Patch] = (),
    ):
        self.interceptor = interceptor
        self._disable_jit = disable_jit
        self._on_call = on_call
        self._again = again
        self._shared_key = shared_key
        self._patches = (*ALWAYS, *patches)
        self._resolved: Resolved | None = None

    @staticmethod
    def is_observed() -> bool:
        """Return whether an observer is active on this thread."""
        state = CONTEXT.value
        return isinstance(state, Scope) and state.observed

    @staticmethod
    def sees_program() -> bool:
        """Return whether observers are shown what runs on this thread now.

        They are not while JAX runs its rules, whose operations are not the program's.
        """
        state = CONTEXT.value
        return isinstance(state, Scope) and state.observed and not state.asleep

    def holds(self) -> bool:
        """Return whether an equal interceptor is active on this thread."""
        state = CONTEXT.value
        if not isinstance(state, Scope):
            return False
        return any(active.interceptor == self.interceptor for active in state.activations())

    @staticmethod
    def observers() -> list[Any]:
        """Return the observers of what is active on this thread, innermost first."""
        state, found = CONTEXT.value, []
        while isinstance(state, Scope):
            if (observer := state.activation.observer) is not None:
                found.append(observer)
            state = state.parent
        return found

    @staticmethod
    def unobserved(
        is_seen: Callable[[Observer], bool] = lambda observer: False,
    ) -> AbstractContextManager[None]:
        """Return a context in which the innermost observers are shown nothing.

        Their interceptors do not act in it. The context ends at an interceptor without observer.

        Args:
            is_seen: whether an observer may be shown what runs. If all may, nothing changes.
        """
        state, found = CONTEXT.value, []
        while isinstance(state, Scope) and state.activation.observer is not None:
            found.append(state.activation.observer)
            state = state.parent
        if all(map(is_seen, found)):
            return contextlib.nullcontext()
        return CONTEXT(OUTSIDE if state is None else state)

    def is_current(self) -> bool:
        """Return whether the targets still are the objects that were looked up."""
        return self._resolved is not None and self._resolved.is_current()

    @property
    def key(self) -> Hashable:
        """The interceptor's key in JAX's caches."""
        if self._shared_key is None:
            return self.interceptor.cache_key
        names = ((site, name) for site, (name, _) in self._find().table.items())
        return self._shared_key, frozenset(names)

    @property
    def primitives(self) -> dict[Any, tuple[str, Handler]]:
        """The targeted primitives, with their names and handlers."""
        table = self._find().table
        return {site.subject: entry for site, entry in table.items() if site.level == "primitive"}

    @property
    def functions(self) -> dict[Any, tuple[str, Handler]]:
        """The sites of the targeted functions, with names and handlers."""
        table = self._find().table
        return {site: entry for site, entry in table.items() if site.level == "function"}

    def run(self, fn: Callable, args: tuple, kwargs: dict, observer: Observer | None = None) -> Any:
        """Call ``fn`` with the targets tapped.

        Args:
            fn: any callable.
            args: its positional arguments.
            kwargs: its keyword arguments.
            observer: is shown operations that meet ``grad``, ``vmap`` and the like.

        Raises:
            TargetError: a target is unknown, can't be tapped or is named twice.
        """
        resolved = self._find()
        activation = Activation(
            self.interceptor,
            resolved.table,
            resolved.patches,
            self._disable_jit,
            (args, kwargs),
            observer,
            None if self._shared_key is None else self.key,
            self._on_call,
            self._again,
        )
        outer = CONTEXT.value
        outer = outer if isinstance(outer, Scope) else None
        return run_in(Scope(activation, outer), fn, args, kwargs, activation.finish)

    def _find(self) -> Resolved:
        if self._resolved is None or not self._resolved.is_current():
            with _RESOLVE_LOCK:
                self._resolved = Resolved(self.interceptor, SITES, self._patches, self._disable_jit)
        return self._resolved
