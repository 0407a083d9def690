"""PatchEngine: taps by patching what a program calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..errors import TargetError
from ..interceptor import PRIMITIVE_PREFIX, Interceptor
from .context import CONTEXT
from .coroutines import disguised, run_in
from .scope import OUTSIDE
from .taps import Taps

P = ParamSpec("P")
R = TypeVar("R")


class PatchEngine:
    """Patches the functions that an interceptor names while a wrapped function runs.

    Patches are process-wide, but only the scope of the wrapped call decides what they do: other
    threads and tasks run the originals, after one check. The scope is part of JAX's cache keys,
    so what was traced, lowered or compiled inside is never used outside, nor the reverse.

    Args:
        disable_jit: run wrapped functions under ``jax.disable_jit``. Primitives can be tapped
            only then. The default leaves JIT on.
    """

    def __init__(self, disable_jit: bool = False):
        if not isinstance(disable_jit, bool):
            raise TypeError(f"disable_jit must be a bool, got {disable_jit!r}.")
        self.disable_jit = disable_jit

    def wrap(self, fn: Callable[P, R], interceptor: Interceptor) -> Callable[P, R]:
        """Returns ``fn``, run with ``interceptor`` active.

        The scope is the call, on its thread: threads and tasks that it starts are outside.
        For coroutines and generators it is each of their steps. Where the interceptor is
        active already, the wrapper does nothing.

        Args:
            fn: any callable: plain, jitted, asynchronous or a generator function.
            interceptor: the targets and their handlers. Targets are looked up, and patched, at
                the first call, not before.

        Raises:
            TargetError: at once for wrong types and for primitives without ``disable_jit``; at
                the call for a target that is unknown, can't be tapped or is named twice.
        """
        if not callable(fn):
            raise TargetError(f"PatchEngine.wrap needs a callable, got {fn!r}.")
        if not isinstance(interceptor, Interceptor):
            raise TargetError(
                f"PatchEngine.wrap needs an Interceptor, got {type(interceptor).__name__}. Build "
                "one with Interceptor({'jax.numpy.dot': handler})."
            )
        primitives = [target for target in interceptor if target.startswith(PRIMITIVE_PREFIX)]
        if primitives and not self.disable_jit:
            raise TargetError(
                f"{primitives[0]!r} can't be tapped with JIT on: JAX's caches hide the binds of "
                "primitives. Use PatchEngine(disable_jit=True), or tap the function that binds it."
            )
        taps = Taps(interceptor, disable_jit=self.disable_jit)

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            if taps.holds():
                return fn(*args, **kwargs)
            return taps.run(fn, args, kwargs)

        return disguised(call, fn)


def untapped(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn``, run with no interceptor active.

    For what must stay as it is wherever it is called from, such as the body of a kernel. A
    coroutine or generator that it returns inside a scope runs outside of it, too.

    Raises:
        TargetError: ``fn`` is not callable.
    """
    if not callable(fn):
        raise TargetError(f"untapped needs a callable, got {fn!r}.")

    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        if CONTEXT.value is None:
            return fn(*args, **kwargs)
        return run_in(OUTSIDE, fn, args, kwargs)

    return disguised(call, fn)
