"""Subclasses of a model's classes, whose methods are wrapped.

Linen opens a name scope for each module; NNX and Equinox don't. A quantized model consists of
objects of such subclasses, each with a Tag, which opens the scope. The framework's and the user's
classes are never changed. Jitted methods (``nnx.jit``, ``eqx.filter_jit``) stay as they are inside
the scope, so that equal blocks share a trace.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from .bridge import Quantized

MARK = "jaxtap_original"
"""The attribute of a subclass that holds the original class."""


@dataclasses.dataclass(frozen=True)
class Tag:
    """What a module of a quantized model carries, as a static attribute.

    Attributes:
        quantized: how the model is quantized, for a module whose methods start a quantized run.
            None in the copy of the model that is traced, where such a run goes on.
        path: the path of the module as rules write it: from the whole model, and in that copy from
            the module whose method runs, which has "". So equal blocks are equal in the copy,
            wherever in the model they are, and hit JAX's and the frameworks' caches.
    """

    quantized: Quantized | None
    path: str


class Subclasses:
    """Make the subclasses, one per class.

    Args:
        wrap: takes the name of a method and its function of ``(self, *args, **kwargs)``; returns
            another such function.
        base: the framework's own base class: its methods, and those above it, aren't wrapped.
        unchanged: classes that are left as they are.
        namespace: returns further attributes of a subclass.
        options: takes a class; returns the keyword arguments of its subclass's definition.
        unwrap: takes a class and its method; returns the function to wrap.
        only: the names of the methods that are wrapped; None for all.
    """

    def __init__(
        self,
        wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
        base: type,
        *,
        unchanged: tuple[type, ...] = (),
        namespace: Callable[[], dict[str, Any]] = dict,
        options: Callable[[type], dict[str, Any]] = lambda cls: {},
        unwrap: Callable[[type, Any], Any] = lambda cls, method: method,
        only: Collection[str] | None = None,
    ):
        self._wrap = wrap
        self._base = base
        self._unchanged = unchanged
        self._namespace = namespace
        self._options = options
        self._unwrap = unwrap
        self._only = only
        # Never freed: JAX's registry of pytrees holds the classes anyway.
        self._made: dict[type, type] = {}
        self._lock = threading.Lock()

    def of(self, cls: type) -> type:
        """Return the subclass for a class; the class if it needs none."""
        if is_ours(cls) or issubclass(cls, self._unchanged):
            return cls
        with self._lock:
            if cls not in self._made:
                self._made[cls] = self._make(cls)
            return self._made[cls]

    def _make(self, cls: type) -> type:
        namespace = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            MARK: cls,
        } | self._namespace()
        for name in methods_of(cls, self._base):
            if self._only is not None and name not in self._only:
                continue
            method = self._unwrap(cls, inspect.getattr_static(cls, name))
            namespace[name] = wrapped(cls, name, method, self._wrap)
        return type(cls)(cls.__name__, (cls,), namespace, **self._options(cls))


def by_tag(
    tag_of: Callable[[Any], Tag | None],
    scoped: Callable[..., Any],
    quantized: Callable[..., Any],
) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """Return a ``wrap`` for ``Subclasses`` that asks the module's tag.

    Args:
        tag_of: returns the tag of a module; None for one that is being built.
        scoped: runs a method under a name scope. It takes the path, the method's function, the
            module, and the arguments as a tuple and a dict.
        quantized: starts a quantized run of a method. It takes the tag, the method's name, the
            module, and the arguments.
    """

    def wrap(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            tag = tag_of(self)
            if tag is not None and tag.quantized is None and tag.path:
                return scoped(tag.path, run, self, args, kwargs)
            if tag is not None and tag.quantized is not None and name in tag.quantized.methods:
                return quantized(tag, name, self, args, kwargs)
            return run(self, *args, **kwargs)

        return method

    return wrap


def is_ours(cls: type) -> bool:
    """Return whether a class is one that a ``Subclasses`` has made."""
    return MARK in vars(cls)


def wrapped(
    cls: type,
    name: str,
    method: Any,
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Return a method of ``cls`` wrapped, with its name and its documentation."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(self, type(self))(*args, **kwargs)

    result = wrap(name, run)
    if inspect.isfunction(method):
        return functools.update_wrapper(result, method)
    result.__name__, result.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return result


def methods_of(cls: type, base: type) -> Iterator[str]:
    """Yield the methods that ``cls`` has beyond those of ``base``.

    ``__call__`` counts. Other names with two underscores don't, nor do properties, static and
    class methods, fields, abstract methods, generators and what is asynchronous.
    """
    fields: Collection[str] = getattr(cls, "__dataclass_fields__", ())
    above = set(base.__mro__)
    seen = set()
    for kind in cls.__mro__:
        if kind in above:
            continue
        for name, value in vars(kind).items():
            if name not in seen and name not in fields and _is_method(name, value):
                yield name
            seen.add(name)


def _is_method(name: str, value: Any) -> bool:
    if name.startswith("__") and name != "__call__":
        return False
    if isinstance(value, type | staticmethod | classmethod | property | functools.cached_property):
        return False
    if not callable(value) and not isinstance(value, functools.partialmethod):
        return False
    if not hasattr(type(value), "__get__") or getattr(value, "__isabstractmethod__", False):
        return False
    return not (
        inspect.isgeneratorfunction(value)
        or inspect.iscoroutinefunction(value)
        or inspect.isasyncgenfunction(value)
    )
