"""Subclasses of a model's classes, whose objects have wrapped methods.

Linen opens a name scope for each module; NNX and Equinox don't. A quantized model consists of
objects of such subclasses, each with a Tag, which opens the scope. The framework's and the user's
classes are never changed. Jitted methods (``nnx.jit``, ``eqx.filter_jit``) stay as they are inside
the scope, so that equal blocks share a trace.

A subclass overrides no method, since frameworks ask ``type(self).update is not Base.update`` to
find out what a user has overridden. Objects look their methods up under other names instead.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from hijax_trace import OutsideError
from interception_core import hide_frames, hides_frames
from provider_xla import QuantizationError, Quantized

hide_frames(Path(__file__).parent)

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


@dataclasses.dataclass(eq=False)
class Subclasses:
    """Make the subclasses, one per class.

    Attributes:
        wrap: takes the name of a method and its function of ``(self, *args, **kwargs)``; returns
            another such function.
        base: the framework's own base class: its methods, and those above it, aren't wrapped.
        unchanged: classes that are left as they are.
        namespace: returns further attributes of a subclass.
        options: takes a class; returns the keyword arguments of its subclass's definition.
        unwrap: takes a class and its method; returns the function to wrap.
        new: a global function that takes a class and returns an empty object of its subclass.
            Pickles name it.
        is_wrapped: takes an object's attributes; returns whether its methods are wrapped now. None
            for a framework whose models never see the subclass: it overrides the methods.
    """

    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
    base: type
    _: dataclasses.KW_ONLY
    unchanged: tuple[type, ...] = ()
    namespace: Callable[[], dict[str, Any]] = dict
    options: Callable[[type], dict[str, Any]] = lambda cls: {}
    unwrap: Callable[[type, Any], Any] = lambda cls, method: method
    new: Callable[[type], Any]
    is_wrapped: Callable[[dict[str, Any]], bool] | None
    # Never freed: JAX's registry of pytrees holds the classes anyway.
    _made: dict[type, type] = dataclasses.field(default_factory=dict, init=False)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    def of(self, cls: type) -> type:
        """Return the subclass for a class; the class if it needs none."""
        if is_ours(cls) or issubclass(cls, self.unchanged):
            return cls
        with self._lock:
            if cls not in self._made:
                self._made[cls] = self._make(cls)
            return self._made[cls]

    def _make(self, cls: type) -> type:
        namespace: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            MARK: cls,
        } | self.namespace()
        aliases: dict[str, str] = {}
        for name in methods_of(cls, self.base):
            method = self.unwrap(cls, inspect.getattr_static(cls, name))
            aliases[name] = name if self.is_wrapped is None else f"{_ALIAS}{name}"
            namespace[aliases[name]] = wrapped(cls, name, method, self.wrap)
        if self.is_wrapped is not None:
            if "__call__" in aliases:
                namespace["__call__"] = _Called(cls, namespace[aliases["__call__"]])
            namespace["__getattribute__"] = _looked_up(cls, aliases, self.is_wrapped)
        namespace.setdefault("__reduce_ex__", reduced(cls, self.new))
        kind = _pickled(type(cls), self)
        return kind(cls.__name__, (cls,), namespace, **self.options(cls))


_ALIAS = "jaxtap_method_"
"""What the name begins with under which a subclass has a wrapped method."""


class _Called:
    """The ``__call__`` of a subclass: Python looks that up in the class."""

    def __init__(self, cls: type, method: Callable[..., Any]):
        self._cls, self._method = cls, method

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._cls.__call__
        return types.MethodType(self._method, instance)


def _looked_up(
    cls: type, aliases: dict[str, str], is_wrapped: Callable[[dict[str, Any]], bool]
) -> Callable[[Any, str], Any]:
    """Return the ``__getattribute__`` of a subclass."""
    found: Any = cls.__getattribute__

    def attribute(self: Any, name: str) -> Any:
        alias = aliases.get(name)
        if alias is None:
            return found(self, name)
        held = object.__getattribute__(self, "__dict__")
        # Attributes of an object hide methods of its class.
        return found(self, name if name in held or not is_wrapped(held) else alias)

    return attribute


def reduced(cls: type, new: Callable[[type], Any]) -> Callable[[Any, Any], Any]:
    """Return the ``__reduce_ex__`` of a subclass, which no module has by name."""

    found: Any = cls.__reduce_ex__

    def reduce(self: Any, protocol: Any) -> Any:
        made = found(self, protocol)
        # What pickle calls for an object whose class does not say how it is pickled.
        plain = vars(copyreg)["__newobj__"], (type(self),)
        if isinstance(made, tuple) and made[:2] == plain:
            return new, (cls,), *made[2:]
        return made

    return reduce


@functools.cache
def _pickled(kind: type, subclasses: Subclasses) -> type:
    """Return a metaclass whose classes are pickled as subclasses of the originals."""
    own = type(kind.__name__, (kind,), {})
    copyreg.pickle(own, lambda cls: (_of, (subclasses.new, vars(cls)[MARK])))  # type: ignore[arg-type]
    return own


def _of(new: Callable[[type], Any], cls: type) -> type:
    return type(new(cls))


def by_tag(
    tag_of: Callable[[Any], Tag | None],
    scoped: Callable[..., Any],
    quantized: Callable[..., Any],
) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """Return a ``wrap`` for ``Subclasses`` that asks the module's tag.

    ``tag_of`` is None for a module that is being built. ``scoped(path, function, module, args,
    kwargs)`` runs a method under a name scope, and ``quantized(tag, name, module, ...)`` a
    quantized run of it.
    """

    def wrap(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @hides_frames
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            tag = tag_of(self)
            if tag is not None and tag.quantized is None and tag.path:
                return scoped(tag.path, run, self, args, kwargs)
            if tag is not None and tag.quantized is not None and name in tag.quantized.methods:
                return quantized(tag, name, self, args, kwargs)
            try:
                return run(self, *args, **kwargs)
            except (OutsideError, NotNamedError) as error:
                if tag is None or tag.quantized is None:
                    raise
                raise NotNamedError.of(self, name, tag.quantized) from error

        return method

    return wrap


class NotNamedError(QuantizationError):
    """A method that is not quantized uses stored parameters."""

    @classmethod
    def of(cls, model: Any, name: str, quantized: Quantized) -> NotNamedError:
        """Return the error of a model's method."""
        methods = (*quantized.methods, name)
        return cls(
            f"{type(model).__name__}.{name} must be one of the quantized methods to use stored "
            f"parameters, got methods={quantized.methods!r}. Name it, too: quantize_model(model, "
            f"provider, ..., methods={methods!r})."
        )


def is_tagged(name: str) -> Callable[[dict[str, Any]], bool]:
    """Return an ``is_wrapped`` for ``Subclasses`` that looks at an object's tag."""

    def is_wrapped(held: dict[str, Any]) -> bool:
        tag = held.get(name)
        # Within its scope, a module of a traced copy has the methods of its class.
        return tag is not None and (tag.quantized is not None or bool(tag.path))

    return is_wrapped


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
    class methods, fields, abstract methods, generators, what is asynchronous, and Linen's
    ``setup``.
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
    if (name.startswith("__") and name != "__call__") or name == "setup":
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
