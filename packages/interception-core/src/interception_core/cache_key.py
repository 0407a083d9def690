"""Cache keys: values of a thread that are part of the keys of JAX's caches.

All of them are one user context of JAX. A new one changes the keys of all functions that ran
before, which JAX then traces and compiles again: this one is made when both jax and this package
are imported, and not later with the first plan or kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import jax

if jax.__version_info__ >= (0, 12):
    # It imports Pallas there, which makes a context, too, and all our packages come to import it.
    import jax.extend

_KEYS = jax.make_user_context(None)
"""The values that are not the defaults, as a frozenset, or None. Public JAX API since 0.10."""


class _Current(threading.local):
    values: dict[CacheKey, Hashable] = {}  # replaced, never changed  # noqa: RUF012


_CURRENT = _Current()


class CacheKey:
    """Hold a value of each thread that JAX's caches tell apart.

    ``with key(value):`` sets it. What was traced, lowered or compiled under another value is not
    used then. Make it once, where a module is imported.

    Args:
        default: the value outside of all ``with`` statements.
    """

    def __init__(self, default: Hashable = None):
        self._default = default

    @property
    def value(self) -> Any:
        """The value in this thread."""
        return _CURRENT.values.get(self, self._default)

    def __call__(self, value: Hashable) -> _Entered:
        """Return a context manager that sets the value."""
        return _Entered(self, value)


class _Entered:
    """Sets the value of a key, and gives JAX the values of all."""

    __slots__ = ("_before", "_context", "_key", "_value")

    def __init__(self, key: CacheKey, value: Hashable):
        self._key, self._value = key, value

    def __enter__(self) -> None:
        self._before = before = _CURRENT.values
        # Such as that of a name scope which no interceptor tells from the one around it.
        self._context = None
        if before.get(self._key, self._key._default) == self._value:
            return
        values = {**before, self._key: self._value}
        if self._value == self._key._default:
            del values[self._key]
        # Equal values give equal keys, whatever was entered first. A frozenset keeps its hash.
        self._context = _KEYS(frozenset(values.items()) if values else None)
        self._context.__enter__()
        _CURRENT.values = values

    def __exit__(self, *exc_info: Any) -> None:
        if self._context is not None:
            _CURRENT.values = self._before
            self._context.__exit__(*exc_info)
