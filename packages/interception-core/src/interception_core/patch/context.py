"""Context: the state of this thread, and its key in JAX's caches.

JAX's caches hold their keys for any time. So they get a small key, and the state that it stands
for is here.
"""

from __future__ import annotations

import threading
from typing import Any

from ..cache_key import CacheKey

_KEY = CacheKey()
"""The key of the current state, or None."""


class Context(threading.local):
    """The state of this thread: None, a ``Scope`` or OUTSIDE, whose ``key`` is for JAX's caches."""

    value: Any = None

    def __call__(self, state: Any) -> Current:
        """Return a context manager that makes a state current."""
        return Current(state)


CONTEXT = Context()


class Current:
    """Makes a state, and its key in JAX's caches, current."""

    __slots__ = ("_before", "_keys", "_state")

    def __init__(self, state: Any):
        self._state = state
        self._keys = _KEY(None if state is None else state.key)

    def __enter__(self) -> None:
        self._keys.__enter__()
        self._before = CONTEXT.value
        CONTEXT.value = self._state

    def __exit__(self, *exc_info: Any) -> None:
        CONTEXT.value = self._before
        self._keys.__exit__(*exc_info)
