"""What is active on this thread, and what of it JAX's caches are keyed by.

JAX's caches keep their keys for as long as they please. So they are given a small key, and the
state that it stands for, with all that hangs on it, stays here.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, Protocol

import jax

_KEYS = jax.make_user_context(default_value=None)
"""None, or the key of the current state. Public JAX API since 0.10."""


class Keyed(Protocol):
    """A state."""

    @property
    def key(self) -> Hashable:
        """What stands for it in JAX's caches."""


class Context(threading.local):
    """The state of this thread: None, a ``Scope`` or OUTSIDE (see ``scope``)."""

    value: Any = None

    def __call__(self, state: Keyed | None) -> Current:
        """Returns a context manager: makes a state current."""
        return Current(state)


CONTEXT = Context()


class Current:
    """Makes a state current on this thread, and its key a part of JAX's cache keys."""

    __slots__ = ("_before", "_keys", "_state")

    def __init__(self, state: Keyed | None):
        self._state = state
        self._keys = _KEYS(None if state is None else state.key)

    def __enter__(self) -> None:
        self._keys.__enter__()
        self._before = CONTEXT.value
        CONTEXT.value = self._state

    def __exit__(self, *exc_info: Any) -> None:
        CONTEXT.value = self._before
        self._keys.__exit__(*exc_info)
