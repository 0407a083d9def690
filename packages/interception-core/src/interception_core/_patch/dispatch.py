"""What happens at a tap: which interceptor is asked, and what runs in which scope.

The innermost interceptor is asked first. While a handler runs, only the interceptors outside
its own are active, so no handler ever sees its own operations. What the program itself does
stays visible: an original that runs on (``proceed``, ``NotImplemented``) keeps the interceptors
active that have not handled the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._opcall import OpCall
from .scope import OUTSIDE, Entered, Scope, State
from .targets import Site


def run(site: Site, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    """Runs a call of ``site`` that was made in ``state``."""
    if not isinstance(state, Scope) or state.asleep:
        return original(*args, **kwargs)
    level: Scope | None = state
    while level is not None:
        if site in level.activation.table and site not in level.within:
            return _ask(site, original, state, (), args, kwargs)
        level = level.parent
    return original(*args, **kwargs)


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
        activation = level.activation
        entry = None if site in level.within else activation.table.get(site)
        if entry is None:
            kept = (*kept, level)
        else:
            outer = level.parent
            proceed = _Proceed(site, original, outer, kept)
            op_name, handler = entry
            within = frozenset(activation.table[s][0] for s in level.within)
            call = OpCall(
                op_name, site.level, level.path, args, kwargs, activation, within, proceed
            )
            with Entered(OUTSIDE if outer is None else outer):
                result = handler(call, *args, **kwargs)
            if result is not NotImplemented:
                return result
            kept = (*kept, level.inside(site))
        level = level.parent
    scope: Scope | None = None
    for open_level in reversed(kept):
        scope = open_level.rebased(scope)
    with Entered(OUTSIDE if scope is None else scope):
        return original(*args, **kwargs)


class _Proceed:
    """The rest of a call, for its handler to run as often as it likes."""

    __slots__ = ("_kept", "_original", "_outer", "_site")

    def __init__(
        self, site: Site, original: Callable, outer: Scope | None, kept: tuple[Scope, ...]
    ):
        self._site, self._original, self._outer, self._kept = site, original, outer, kept

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        return _ask(self._site, self._original, self._outer, self._kept, args, kwargs)
