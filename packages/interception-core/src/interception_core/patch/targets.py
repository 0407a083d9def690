"""Targets: from a dotted name to an object and its patches."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from .. import _compat
from ..errors import TargetError, unknown_name
from ..interceptor import PRIMITIVE_PREFIX, Handler, Interceptor
from .patches import (
    AttributePatch,
    CodePatch,
    Dispatch,
    Patch,
    PatchSet,
    site_of_tap,
    tap_function,
)


class Site:
    """One callable that can be tapped, under all its names.

    Attributes:
        subject: the callable itself.
        level: "function" or "primitive".
        name: the target that it was first found by.
        home: "jax" or "flax" for a function of theirs, which reads an iterable argument to its end.
            None for others, which may take from an iterator, and leave the rest to their caller.
        tap: a function that replaces it as an attribute.
        patches: the patches that tap it for all callers.
    """

    __slots__ = (
        "__weakref__",
        "_attributes",
        "home",
        "level",
        "name",
        "patches",
        "subject",
        "tap",
    )

    def __init__(self, subject: Any, name: str, original: Callable, run: Dispatch):
        self.subject = subject
        self.name = name
        self.level = "primitive" if isinstance(subject, _compat.Primitive) else "function"
        self.home = _home(subject) if self.level == "function" else None
        self.tap = tap_function(original, original, run, self)
        self.patches: tuple[Patch, ...] = ()
        self._attributes: dict[tuple[int, str], AttributePatch] = {}

    def attribute(self, holder: Any, name: str) -> AttributePatch:
        """Return the patch of an attribute, which all interceptors share."""
        place = (id(holder), name)
        if place not in self._attributes:
            self._attributes[place] = AttributePatch(holder, name, self.tap)
        return self._attributes[place]

    def __repr__(self) -> str:
        return f"<site {self.name}>"


def _home(subject: Any) -> str | None:
    home = str(getattr(subject, "__module__", None)).partition(".")[0]
    is_method = "." in getattr(subject, "__qualname__", "")
    return home if home == "jax" or (home == "flax" and not is_method) else None


class CallSites(dict[int, Site]):
    """The tapped instances of one class, whose ``__call__`` is patched, by ``id``."""


class Sites:
    """Finds or makes the site of an object, one per process.

    Args:
        run: what a tap calls; see ``patches.Dispatch``.
        run_call: what the tap of a class's ``__call__`` calls. Its site is a ``CallSites``.
    """

    def __init__(self, run: Dispatch, run_call: Dispatch):
        self._run, self._run_call = run, run_call
        self._sites: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()
        self._calls: dict[FunctionType, tuple[CodePatch, CallSites]] = {}

    def get(self, subject: Any, name: str) -> Site:
        """Return the site of an object.

        Raises:
            TargetError: the object can't be tapped.
        """
        site = self._sites.get(id(subject))
        if site is None:
            original = subject.bind if isinstance(subject, _compat.Primitive) else subject
            self._check(subject, name)
            site = Site(subject, name, original, self._run)
            site.patches = self._patches(site)
            self._sites[id(subject)] = site
        return site

    def call_patch(self, cls: type) -> tuple[CodePatch, CallSites]:
        """Return the patch of a class's ``__call__``, and its instances' sites.

        Raises:
            TargetError: ``__call__`` is not a Python function.
        """
        function = inspect.getattr_static(cls, "__call__", None)
        if not isinstance(function, FunctionType):
            raise TargetError(
                "A target that is an instance must have a Python function as its __call__, got an "
                f"instance of {cls.__module__}.{cls.__qualname__}. Tap the function that it calls."
            )
        if function not in self._calls:
            sites = CallSites()
            self._calls[function] = (
                CodePatch(function, self._run_call, sites, keep_signature=False),
                sites,
            )
        return self._calls[function]

    @staticmethod
    def _check(subject: Any, name: str) -> None:
        untappable = type | BuiltinFunctionType | functools.partial
        if not callable(subject) and not isinstance(subject, _compat.Primitive):
            problem = "which is not callable"
        elif isinstance(subject, untappable):
            problem = f"a {type(subject).__name__}, whose aliases would be missed"
        else:
            return
        raise TargetError(
            f"A target must be a function that can be patched, got {name!r}, {problem}. Tap a "
            "Python function, a method, a jitted function, a callable instance or a primitive "
            "('primitive:NAME')."
        )

    def _patches(self, site: Site) -> tuple[Patch, ...]:
        subject = site.subject
        if isinstance(subject, FunctionType):
            return (CodePatch(subject, self._run, site),)
        if isinstance(subject, _compat.PjitFunction):
            return self._jitted_patches(site)
        if isinstance(subject, _compat.Primitive):
            return (site.attribute(subject, "bind"),)
        patch, sites = self.call_patch(type(subject))
        sites[id(subject)] = site
        return (patch,)

    def _jitted_patches(self, site: Site) -> tuple[Patch, ...]:
        """Return the patches of a jitted function: before dispatch and inside.

        Before its dispatch, attributes are patched: the one that the target names, and the defining
        module's, which JAX's callers (``x @ w``) look up. Other aliases reach the Python function
        that is traced, which is patched, too. It is traced again because the scope is a part of
        the cache key.
        """
        subject = site.subject
        patches: list[Patch] = []
        traced = _compat.traced_function(subject)
        if isinstance(traced, FunctionType):
            # ``__module__`` would be the public module, which JAX sets.
            home = sys.modules.get(traced.__globals__.get("__name__", ""))
            if home is not None and vars(home).get(traced.__name__) is subject:
                patches.append(site.attribute(home, traced.__name__))
            patches.append(CodePatch(traced, self._run, site))
        return tuple(patches)


class Resolved:
    """The targets of an interceptor, as handlers by site, and patches.

    Raises:
        TargetError: a target is unknown, can't be tapped or is named twice.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        sites: Sites,
        always: Iterable[Patch],
        patch_primitives: bool = True,
    ):
        self.table: dict[Site, tuple[str, Handler]] = {}
        self._found: list[tuple[Any, str, Site]] = []
        patches = list(always)
        names: dict[Site, str] = {}
        for target, handler in interceptor.items():
            if target.startswith(PRIMITIVE_PREFIX):
                op_name = target.removeprefix(PRIMITIVE_PREFIX)
                site = sites.get(find_primitive(op_name), target)
            else:
                holder, attribute = find_holder(target)
                site = self._site(sites, holder, attribute, target)
                self._found.append((holder, attribute, site))
                op_name = f"{holder.__name__}.{attribute}" if inspect.isclass(holder) else attribute
                if isinstance(site.subject, _compat.PjitFunction):
                    patches.append(site.attribute(holder, attribute))
            if site in names:
                raise TargetError(
                    f"Each function must have one handler, got {names[site]!r} and {target!r}, "
                    "which are the same function under two names. Keep one of them: it covers "
                    "both."
                )
            names[site] = target
            self.table[site] = (op_name, handler)
            if site.level == "function" or patch_primitives:
                patches.extend(site.patches)
        self.patches = PatchSet(patches)

    @staticmethod
    def _site(sites: Sites, holder: Any, attribute: str, target: str) -> Site:
        subject = _subject(holder, attribute)
        return site_of_tap(subject) or sites.get(subject, target)

    def is_current(self) -> bool:
        """Return whether every name still means the same object."""
        for holder, attribute, site in self._found:
            subject = _subject(holder, attribute)
            if subject is not site.subject and site_of_tap(subject) is not site:
                return False
        return True


def _subject(holder: Any, attribute: str) -> Any:
    if inspect.isclass(holder):
        found = inspect.getattr_static(holder, attribute)
    else:
        found = getattr(holder, attribute)
    return getattr(found, "__func__", found)


def find_holder(target: str) -> tuple[Any, str]:
    """Return the holder of a dotted target, and the attribute's name.

    Raises:
        TargetError: the target is not a dotted name.
        UnknownNameError: the module or attribute does not exist. The message has the nearest names.
    """
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise TargetError(
            f"A target must be the dotted name of a function, got {target!r}. Write for example "
            "'jax.numpy.dot', or 'primitive:dot_general' for a primitive."
        )
    holder: Any = _import(parts[0], target)
    for depth, part in enumerate(parts[1:], start=1):
        path = ".".join(parts[:depth])
        if not hasattr(holder, part) and inspect.ismodule(holder):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"{path}.{part}")
        if not hasattr(holder, part):
            known = [f"{path}.{name}" for name in dir(holder) if not name.startswith("_")]
            raise unknown_name("target", f"{path}.{part}", known, f"It is part of {target!r}.")
        if depth < len(parts) - 1:
            holder = getattr(holder, part)
    return holder, parts[-1]


def _import(module: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise unknown_name(
            "target", target, sorted(name for name in sys.modules if "." not in name)
        ) from error


def find_primitive(name: str) -> Any:
    """Return the primitive of a name."""
    known = _compat.primitives()
    if name not in known:
        raise unknown_name("primitive", name, known)
    return known[name]


def primitive_names() -> frozenset[str]:
    """Return the names of all primitives that can be targets.

    They include those of other libraries, and differ between versions of JAX.
    """
    return frozenset(_compat.primitives())


def loaded(target: str) -> Any:
    """Return the object that a target names, if it is imported.

    Nothing is imported, so that a table of operations of many frameworks imports none of them.

    Args:
        target: a dotted name, such as ``"flax.linen.LayerNorm.__call__"``.

    Returns:
        The object; None if its package is not imported, or has no such name.
    """
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is not None:
            for name in parts[length:]:
                found = getattr(found, name, None)
            return found
    return None
