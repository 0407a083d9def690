"""Interceptor: targets, their handlers, and the key in JAX's caches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from .errors import TargetError

Handler = Callable[..., Any]
"""Called as ``handler(call, *args, **kwargs)``; returns the result or ``NotImplemented``."""

PRIMITIVE_PREFIX = "primitive:"


class Interceptor(Mapping[str, Handler]):
    """A frozen mapping from targets to handlers.

    Args:
        handlers: handlers by target. A target is a dotted name (``jax.numpy.dot``,
            ``flax.linen.Dense.__call__``) or a primitive (``primitive:dot_general``).
        key: a hashable, which is a part of JAX's cache keys while the interceptor is active.
            Interceptors with equal keys and targets share traces, so their handlers must give
            equal results. Without a key, the interceptor shares traces with no other.
        path_key: maps a module path (``"encoder/layer_0"``) to a hashable for the cache key. Paths
            with equal values share the traces of jitted functions that are called under them, so
            every handler must treat them alike. By default all paths differ, and a model's layers
            are traced one by one. ``lambda path: None`` is right for handlers that ignore
            ``call.module_path`` and ``call.op_id``, and several times faster to trace.
        origin_key: maps the provenance of an operand (``"args[0]['w']"``) to a hashable. An engine
            asks the handlers again about another call of a jitted function if an operand's value
            differs. Every handler must treat provenances with equal values alike. By default all
            inputs differ.
        is_pure: whether handlers do nothing but return their results. An engine may then leave out
            a handler, and do again what it did at another operation that did not differ in
            anything that it looked at. A handler that counts or records operations is not pure.

    Attributes:
        key: its part of JAX's cache keys.
        cache_key: the key and the targets.
        given_key: the argument ``key``.
        is_pure: the argument ``is_pure``.

    Raises:
        TargetError: a target is not a name, a handler or a key function is not callable, the
            mapping is empty, or the key can't be hashed.
    """

    __slots__ = (
        "__weakref__",
        "_handlers",
        "_origin_key",
        "_path_key",
        "cache_key",
        "given_key",
        "is_pure",
        "key",
    )

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        key: Hashable = None,
        *,
        path_key: Callable[[str], Hashable] | None = None,
        origin_key: Callable[[str], Hashable] | None = None,
        is_pure: bool = False,
    ):
        if not isinstance(handlers, Mapping) or not handlers:
            raise TargetError(
                f"Interceptor's handlers must be a non-empty mapping, got {handlers!r}. Map target "
                "names to handlers, such as {'jax.numpy.dot': handler}."
            )
        for target, handler in handlers.items():
            if not isinstance(target, str) or not target.removeprefix(PRIMITIVE_PREFIX):
                raise TargetError(
                    f"A target must be a dotted name or a primitive, got {target!r}. Write for "
                    "example 'jax.numpy.dot' or 'primitive:dot_general'."
                )
            if not callable(handler):
                raise TargetError(
                    f"The handler of {target!r} must be callable, got {handler!r}. Pass a function "
                    "handler(call, *args, **kwargs)."
                )
        self.given_key = key
        self.is_pure = is_pure
        if key is None:
            key = object()
        try:
            hash(key)
        except TypeError as error:
            raise TargetError(
                f"Interceptor's key must be hashable, as a part of JAX's cache keys, got {key!r}. "
                "Use a string, a tuple of hashables or a frozen dataclass."
            ) from error
        for name, function in (("path_key", path_key), ("origin_key", origin_key)):
            if function is not None and not callable(function):
                raise TargetError(
                    f"{name} must be a function of a path, got {function!r}. Pass a function or "
                    "None."
                )
        self._handlers = MappingProxyType(dict(handlers))
        self.key = key
        self._path_key = path_key
        self._origin_key = origin_key
        self.cache_key = (key, *sorted(self._handlers))

    @property
    def tells_ids(self) -> bool:
        """Whether handlers may tell operations apart by ids."""
        return self._path_key is None

    def resolve_path(self, path: str) -> Hashable:
        """Return the key of a module path."""
        return path if self._path_key is None else self._path_key(path)

    def resolve_origin(self, path: str) -> Hashable:
        """Return the key of a provenance."""
        return path if self._origin_key is None else self._origin_key(path)

    def __getitem__(self, target: str) -> Handler:
        return self._handlers[target]

    def __iter__(self) -> Iterator[str]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)

    def __hash__(self) -> int:
        return hash(self.cache_key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interceptor) and self.cache_key == other.cache_key

    def __repr__(self) -> str:
        return f"Interceptor({sorted(self._handlers)}, key={self.key!r})"
