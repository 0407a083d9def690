"""Dispatch: which interceptor a tap asks, and in which scope.

The innermost interceptor is asked first. While a handler runs, only interceptors outside its own
are active, so that a handler never sees its operations. Operations of the program stay visible:
while an original runs (after ``proceed`` or ``NotImplemented``), the interceptors are active that
have not handled the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from .. import _compat
from ..call import NO_METADATA, OpCall
from .context import CONTEXT
from .scope import OUTSIDE, Entered, Scope, State
from .settle import settled_call
from .targets import Site


def run(site: Site, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    """Run a call of a site that was made in a state."""
    if state.__class__ is not Scope or state.asleep:
        return original(*args, **kwargs)
    # Most calls equal one before. Their results need no `TappedCall` and no scope.
    activation = state.activation
    if activation.again is not None and site in activation.table and site not in state.within:
        result = activation.again(activation.observer, site, args, kwargs)
        if result is not NotImplemented:
            return result
    return _ask(site, original, state, (), args, kwargs)


def _ask(
    site: Site,
    original: Callable,
    level: Scope | None,
    kept: tuple[Scope, ...],
    args: tuple,
    kwargs: dict,
) -> Any:
    """Ask a scope and those outside, then run the original."""
    if site.home is not None:
        args, kwargs = settled_call(args, kwargs, site.home == "jax")
    while level is not None:
        entry = level.activation.table.get(site)
        if entry is None or site in level.within:
            kept = (*kept, level)
        else:
            op_name, handler = entry
            call = TappedCall(op_name, site, original, level, kept, args, kwargs)
            on_call = level.activation.on_call
            if on_call is not None:
                result = on_call(handler, call, *args, **kwargs)
            else:
                with call.outside():
                    result = handler(call, *args, **kwargs)
            if result is not NotImplemented:
                return result
            kept = (*kept, level.inside(site))
        level = level.parent
    state: State = OUTSIDE
    for scope in reversed(kept):
        state = scope.rebased(state if isinstance(state, Scope) else None)
    if state is CONTEXT.value:
        return original(*args, **kwargs)
    with Entered(state):
        return original(*args, **kwargs)


class TappedCall(OpCall):
    """A call of a tapped function or primitive.

    Attributes:
        site: the target that is called, a key of `Taps.functions`.
    """

    __slots__ = ("_kept", "_original", "_scope", "label", "number", "site")

    label: str  # pyrefly: ignore[bad-override]
    number: int  # pyrefly: ignore[bad-override]

    def __init__(
        self,
        op_name: str,
        site: Site,
        original: Callable,
        scope: Scope,
        kept: tuple[Scope, ...],
        args: tuple,
        kwargs: dict,
    ):
        self.op_name = op_name
        self.module_path = path = scope.path
        self.level = site.level
        self.params = kwargs
        self._args = args
        self.site = site
        self._original = original
        self._scope = scope
        self._kept = kept
        self.number, self.label = scope.activation.number(path, op_name)

    @property
    def within(self) -> frozenset[str]:
        table = self._scope.activation.table
        return frozenset(table[site][0] for site in self._scope.within)

    def proceed(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self.site, self._original, self._scope.parent, self._kept, args, kwargs)

    def let_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original as after NotImplemented: operations in it are tapped."""
        kept = (*self._kept, self._scope.inside(self.site))
        return _ask(self.site, self._original, self._scope.parent, kept, args, kwargs)

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which the interceptors are active that are around this one."""
        outer = self._scope.parent
        return CONTEXT(OUTSIDE) if outer is None else Entered(outer)

    @property
    def function(self) -> Callable[..., Any]:
        """The called function, which asks the interceptors active when called."""
        return functools.partial(_run_now, self.site, self._original)

    @property
    def observer(self) -> Any:
        """The observer that `Taps.run` was given."""
        return self._scope.activation.observer

    def provenance(self, value: Any) -> str | None:
        return self._scope.activation.origins().get(id(value))

    def is_linear(self, value: Any) -> bool:
        # Which values depend on a function's arguments is known in the outermost trace alone.
        return self._scope.linear or _compat.is_tangent(value)

    def _attach(self, value: Any, metadata: Mapping[str, Any]) -> None:
        self._scope.activation.metadata[id(value)] = value, metadata

    def metadata(self, value: Any) -> Mapping[str, Any]:
        return self._scope.activation.metadata.get(id(value), (None, NO_METADATA))[1]


def _run_now(site: Site, original: Callable, *args: Any, **kwargs: Any) -> Any:
    return run(site, original, CONTEXT.value, args, kwargs)
