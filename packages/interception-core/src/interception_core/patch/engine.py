"""PatchEngine: taps by patching what a program calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .._compat import hides_frames
from ..engine import check_wrapped
from ..errors import TargetError
from ..interceptor import PRIMITIVE_PREFIX, Interceptor
from .context import CONTEXT
from .coroutines import run_in, wraps_as
from .scope import OUTSIDE
from .taps import Taps

P = ParamSpec("P")
R = TypeVar("R")


class PatchEngine:
    """An engine that patches functions while a wrapped function runs.

    Patches are process-wide, but act only in the scope of the wrapped call. Other threads and tasks
    run the originals after one check. The scope is a part of JAX's cache keys, so traces,
    lowerings and compiled programs made inside are never reused outside, and vice versa.

    Args:
        disable_jit: whether wrapped functions run under ``jax.disable_jit``. Only then can
            primitives be tapped.

    Raises:
        TypeError: ``disable_jit`` is not a bool.
    """

    def __init__(self, disable_jit: bool = False):
        if not isinstance(disable_jit, bool):
            raise TypeError(f"disable_jit must be a bool, got {disable_jit!r}. Pass True or False.")
        self.disable_jit = disable_jit

    def wrap(self, fn: Callable[P, R], interceptor: Interceptor) -> Callable[P, R]:
        """Return ``fn`` with an interceptor's targets tapped.

        The scope is the call, on its thread. Threads and tasks that it starts are outside. For
        coroutines and generators it is each step. The wrapper does nothing while the interceptor
        is active already.

        Args:
            fn: a callable: plain, jitted, asynchronous or a generator function.
            interceptor: the targets and their handlers. Targets are looked up and patched at the
                first call.

        Raises:
            TargetError: at once, for wrong types and for primitives without ``disable_jit``. At
                the call, for a target that is unknown, can't be tapped or is named twice.
        """
        check_wrapped(self, fn, interceptor)
        primitives = [target for target in interceptor if target.startswith(PRIMITIVE_PREFIX)]
        if primitives and not self.disable_jit:
            raise TargetError(
                f"Targets of PatchEngine must be functions while JIT is on, got {primitives[0]!r}: "
                "JAX's caches hide the binds of primitives. Use PatchEngine(disable_jit=True), or "
                "tap the function that binds it."
            )
        taps = Taps(interceptor, disable_jit=self.disable_jit)

        @hides_frames
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            if taps.holds():
                return fn(*args, **kwargs)
            return taps.run(fn, args, kwargs)

        return wraps_as(call, fn)


def untapped(fn: Callable[P, R]) -> Callable[P, R]:
    """Return ``fn``, which runs without active interceptors.

    Use it for code that must not be tapped, such as the body of a kernel. A coroutine or generator
    that it returns runs without interceptors, too.

    Args:
        fn: a callable.

    Raises:
        TargetError: ``fn`` is not callable.
    """
    if not callable(fn):
        raise TargetError(f"untapped's argument must be a callable, got {fn!r}. Pass a function.")

    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        if CONTEXT.value is None:
            return fn(*args, **kwargs)
        return run_in(OUTSIDE, fn, args, kwargs)

    return wraps_as(call, fn)
