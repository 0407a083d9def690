"""What happens at a tap: which interceptor is asked, and what runs in which scope.

The innermost interceptor is asked first. While a handler runs, only the interceptors outside
its own are active, so no handler ever sees its own operations. What the program itself does
stays visible: an original that runs on (``proceed``, ``NotImplemented``) keeps the interceptors
active that have not handled the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..call import NO_METADATA, OpCall
from .context import CONTEXT
from .scope import OUTSIDE, Entered, Scope, State
from .targets import Site


def run(site: Site, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    """Runs a call of ``site`` that was made in ``state``."""
    if state.__class__ is not Scope or state.asleep:
        return original(*args, **kwargs)
    return _ask(site, original, state, (), args, kwargs)


def _ask(
    site: Site,
    original: Callable,
    level: Scope | None,
    kept: tuple[Scope, ...],
    args: tuple,
    kwargs: dict,
) -> Any:
    """Asks ``level`` and those outside it, then runs the original in what was ``kept``."""
    while level is not None:
        entry = level.activation.table.get(site)
        if entry is None or site in level.within:
            kept = (*kept, level)
        else:
            op_name, handler = entry
            call = TappedCall(op_name, site, original, level, kept, args, kwargs)
            outer = level.parent
            with CONTEXT(OUTSIDE) if outer is None else Entered(outer):
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
    """A call of a tapped function, or of a primitive with JIT off, as the program makes it."""

    __slots__ = ("_kept", "_number", "_original", "_scope", "_site", "_trace")

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
        self._site = site
        self._original = original
        self._scope = scope
        self._kept = kept
        self._number, self._trace = scope.activation.number(path, op_name)

    @property
    def op_id(self) -> str:
        parts = filter(None, (self.module_path, self._trace, self.op_name))
        return f"{'/'.join(parts)}:{self._number}"

    @property
    def within(self) -> frozenset[str]:
        table = self._scope.activation.table
        return frozenset(table[site][0] for site in self._scope.within)

    def proceed(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self._site, self._original, self._scope.parent, self._kept, args, kwargs)

    def let_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original as after NotImplemented: what it consists of is tapped."""
        kept = (*self._kept, self._scope.inside(self._site))
        return _ask(self._site, self._original, self._scope.parent, kept, args, kwargs)

    @property
    def function(self) -> Callable[..., Any]:
        """The called function. Whichever interceptors are active when it is called are asked."""
        return functools.partial(_run_now, self._site, self._original)

    @property
    def site(self) -> Site:
        """Stands for what is called, under whatever name; hashable, as in `Taps.functions`."""
        return self._site

    @property
    def observer(self) -> Any:
        """The observer that `Taps.run` was given."""
        return self._scope.activation.observer

    def provenance(self, value: Any) -> str | None:
        return self._scope.activation.origins().get(id(value))

    def _attach(self, value: Any, metadata: Mapping[str, Any]) -> None:
        self._scope.activation.metadata[id(value)] = value, metadata

    def metadata(self, value: Any) -> Mapping[str, Any]:
        return self._scope.activation.metadata.get(id(value), (None, NO_METADATA))[1]


def _run_now(site: Site, original: Callable, *args: Any, **kwargs: Any) -> Any:
    return run(site, original, CONTEXT.value, args, kwargs)
