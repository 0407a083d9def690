"""Interceptor: what is tapped, by what, and under which cache key."""

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
        handlers: target name to handler. A target is a dotted name
            (``jax.numpy.dot``, ``flax.linen.Dense.__call__``) or a primitive
            (``primitive:dot_general``).
        key: hashable; part of every JAX trace and jit cache key while the interceptor is
            active. Equal keys on equal targets promise equal results: such interceptors share
            traces. Without one, the interceptor gets a key of its own, and what its handlers do is
            shared with nobody.
        path_key: maps a module path (``"encoder/layer_0"``) to the hashable that stands for it
            in the cache key. Two paths with equal values share the traces of the jitted
            functions called under them, so they must be treated alike by every handler. The
            default keeps all paths apart, and so traces what a model calls once for each of its
            layers. ``lambda path: None`` is right, and several times faster to trace, for
            handlers that ignore ``call.module_path`` and ``call.op_id``.
        origin_key: maps the provenance of an operand (``"args[0]['w']"``) to the hashable that
            stands for it where an engine decides whether the handlers have to be asked again
            about another call of a jitted function. Equal values must be treated alike by every
            handler. The default keeps all inputs apart.

    Attributes:
        cache_key: the key and the targets.
        given_key: the key that it was given; None if it has one of its own.

    Raises:
        TargetError: a target is not a name, a handler is not callable, the mapping is empty or
            the key cannot be hashed.
    """

    __slots__ = (
        "__weakref__",
        "_handlers",
        "_key",
        "_origin_key",
        "_path_key",
        "cache_key",
        "given_key",
    )

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        key: Hashable = None,
        *,
        path_key: Callable[[str], Hashable] | None = None,
        origin_key: Callable[[str], Hashable] | None = None,
    ):
        if not isinstance(handlers, Mapping) or not handlers:
            raise TargetError(
                f"Interceptor needs a non-empty mapping of target names to handlers, got "
                f"{handlers!r}."
            )
        for target, handler in handlers.items():
            if not isinstance(target, str) or not target.removeprefix(PRIMITIVE_PREFIX):
                raise TargetError(
                    f"An interception target is a dotted name such as 'jax.numpy.dot' or "
                    f"'primitive:dot_general', got {target!r}."
                )
            if not callable(handler):
                raise TargetError(f"The handler of {target!r} is not callable: {handler!r}.")
        self.given_key = key
        if key is None:
            key = object()
        try:
            hash(key)
        except TypeError as error:
            raise TargetError(
                f"Interceptor key {key!r} cannot be hashed. It becomes part of JAX's cache keys: "
                "use a string, a tuple of hashables or a frozen dataclass."
            ) from error
        if path_key is not None and not callable(path_key):
            raise TargetError(f"path_key must be a function of the module path, got {path_key!r}.")
        if origin_key is not None and not callable(origin_key):
            raise TargetError(f"origin_key must be a function of a path, got {origin_key!r}.")
        self._handlers = MappingProxyType(dict(handlers))
        self._key = key
        self._path_key = path_key
        self._origin_key = origin_key
        self.cache_key = (key, *sorted(self._handlers))

    @property
    def key(self) -> Hashable:
        """The hashable that stands for this interceptor in JAX's cache keys."""
        return self._key

    @property
    def tells_ids(self) -> bool:
        """Whether handlers may treat two operations apart by their ids: without a ``path_key``."""
        return self._path_key is None

    def resolve_path(self, path: str) -> Hashable:
        """Returns what stands for module ``path`` in the cache key."""
        return path if self._path_key is None else self._path_key(path)

    def resolve_origin(self, path: str) -> Hashable:
        """Returns what stands for the provenance ``path``."""
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
        return f"Interceptor({sorted(self._handlers)}, key={self._key!r})"
