"""Patches: how calls reach the dispatcher, process-wide and counted.

A patched function costs every thread one look at CONTEXT, which decides whether it is tapped.
Patches are counted, so that scopes of any thread may end in any order.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any, Protocol

from .context import CONTEXT

_LOCK = threading.RLock()

Dispatch = Callable[[Any, Callable, Any, tuple, dict], Any]
"""Called as ``run(site, original, state, args, kwargs)`` if ``state`` is not None."""


_TEMPLATE = """
def make({free}):
    def tap(*args, **kwargs):
        context = "context"
        original = "original"
        state = context.value
        if state is None:
            return original(*args, **kwargs)
        run = "run"
        site = "site"
        return run(site, original, state, args, kwargs)
        {free}  # never reached: makes them free variables
    return tap
"""


@functools.cache
def _template(free: int) -> CodeType:
    """Return the code of a tap with some free variables."""
    names = ", ".join(f"free_{i}" for i in range(free))
    namespace: dict[str, Any] = {}
    exec(_TEMPLATE.format(free=names), namespace)
    return namespace["make"](*range(free)).__code__


def tap_code(like: CodeType, original: Callable, run: Dispatch, site: Any) -> CodeType:
    """Return code that calls ``run`` if CONTEXT has a value, else ``original``.

    It finds these among its constants, so it fits a function of any module. It has the free
    variables, name and place of ``like``, so that closures keep their cells, and tracebacks and
    JAX's debug info do not change.
    """
    parts = {"context": CONTEXT, "original": original, "run": run, "site": site}
    template = _template(len(like.co_freevars))
    return template.replace(
        co_consts=tuple(
            parts.get(const, const) if isinstance(const, str) else const
            for const in template.co_consts
        ),
        co_freevars=like.co_freevars,
        co_name=like.co_name,
        co_qualname=like.co_qualname,
        co_filename=like.co_filename,
        co_firstlineno=like.co_firstlineno,
    )


def tap_function(like: Any, original: Callable, run: Dispatch, site: Any) -> FunctionType:
    """Return a function that replaces a callable as an attribute."""
    code = tap_code(_template(0), original, run, site)
    tap = FunctionType(code, {"__builtins__": __builtins__})
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__wrapped__"):
        if hasattr(like, name):
            setattr(tap, name, getattr(like, name))
    # Other threads may use attributes such as ``lower`` and ``trace`` of a jitted function.
    for name in dir(like):
        if not name.startswith("__"):
            setattr(tap, name, getattr(like, name))
    tap.__dict__[_SITE] = site
    return tap


_SITE = "__jaxtap_site__"


def site_of_tap(value: Any) -> Any | None:
    """Return the site of a tap, or None for other values."""
    return getattr(value, "__dict__", {}).get(_SITE) if isinstance(value, FunctionType) else None


def copy_function(fn: FunctionType) -> FunctionType:
    """Return a copy of a function that keeps its code."""
    copy = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    copy.__dict__.update(fn.__dict__)
    for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
        setattr(copy, name, getattr(fn, name))
    return copy


class Patch(Protocol):
    """A counted change of one place.

    Attributes:
        count: how many scopes need it.
    """

    count: int

    def install(self) -> None:
        """Make the change, or raise with nothing changed."""

    def uninstall(self) -> None:
        """Undo the change, unless other code has changed the place since."""


class CodePatch:
    """Replaces a Python function's code object, for all its aliases."""

    def __init__(self, fn: FunctionType, run: Dispatch, site: Any, *, keep_signature: bool = True):
        self.count = 0
        self.fn = fn
        self.original = copy_function(fn)
        self._tap = tap_code(fn.__code__, self.original, run, site)
        self._signature: inspect.Signature | None = None
        if (
            keep_signature
            and "__wrapped__" not in fn.__dict__
            and "__signature__" not in fn.__dict__
        ):
            self._signature = inspect.signature(fn)

    def install(self) -> None:
        current = self.fn.__code__
        if current is not self._tap:
            self.original.__code__ = current
        # Set first, so that other threads see the function's signature at any time.
        if self._signature is not None:
            self.fn.__dict__["__signature__"] = self._signature
        self.fn.__code__ = self._tap

    def uninstall(self) -> None:
        if self.fn.__code__ is self._tap:
            self.fn.__code__ = self.original.__code__
        if self._signature is not None:
            self.fn.__dict__.pop("__signature__", None)


def patch_calls(
    function: FunctionType, run: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]
) -> Patch:
    """Return a patch by which ``run(original, args, kwargs)`` makes the calls of a function.

    It acts on the threads on which functions run tapped, while an engine has it installed; see
    ``Taps``. Make one patch of a function, and share it: patches are counted.

    Args:
        function: a Python function, such as a rule of JAX. All its aliases are patched.
        run: returns the call's result. ``original`` does what the function does without it.
    """

    def dispatch(site: Any, original: Callable, state: Any, args: tuple, kwargs: dict) -> Any:
        return run(original, args, kwargs)

    return CodePatch(function, dispatch, None, keep_signature=False)


class AttributePatch:
    """Replaces an attribute of a module, a class or an instance."""

    def __init__(self, holder: Any, name: str, tap: Any):
        self.count = 0
        self._holder, self._name, self._tap = holder, name, tap
        self._own: tuple[Any, ...] = ()

    def install(self) -> None:
        values = vars(self._holder)
        self._own = (values[self._name],) if self._name in values else ()
        setattr(self._holder, self._name, self._tap)

    def uninstall(self) -> None:
        if vars(self._holder).get(self._name) is not self._tap:
            return
        if self._own:
            setattr(self._holder, self._name, self._own[0])
        else:
            delattr(self._holder, self._name)


class PatchSet:
    """The patches of one interceptor, installed while scopes hold them."""

    def __init__(self, patches: Sequence[Patch]):
        self._patches = tuple({id(patch): patch for patch in patches}.values())
        self._count = 0

    def acquire(self) -> None:
        """Install the patches that are not installed yet, all or none."""
        with _LOCK:
            self._count += 1
            if self._count > 1:
                return
            done = 0
            try:
                for patch in self._patches:
                    patch.count += 1
                    done += 1
                    if patch.count == 1:
                        patch.install()
            except BaseException:
                self._count -= 1
                self._drop(self._patches[:done])
                raise

    def release(self) -> None:
        """Undo the patches that no other scope holds."""
        with _LOCK:
            self._count -= 1
            if self._count == 0:
                self._drop(self._patches)

    @staticmethod
    def _drop(patches: Sequence[Patch]) -> None:
        for patch in reversed(patches):
            patch.count -= 1
            if patch.count == 0:
                patch.uninstall()
