"""Engine: the protocol of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

from .errors import TargetError
from .interceptor import Interceptor

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class Engine(Protocol):
    """Runs functions with an interceptor active.

    An engine that follows values through a program under ``jit`` has a true attribute
    ``follows_values``: it knows ``OpCall.kind``, ``OpCall.proxy`` and the provenance of moved
    inputs. Providers treat engines without it as ``PatchEngine``.
    """

    def wrap(self, fn: Callable[P, R], interceptor: Interceptor) -> Callable[P, R]:
        """Return ``fn`` with an interceptor's targets tapped."""
        ...


def check_wrapped(engine: Engine, fn: object, interceptor: object) -> None:
    """Check the arguments of ``engine.wrap(fn, interceptor)``.

    Raises:
        TargetError: the function is not callable, or the interceptor is not an ``Interceptor``.
    """
    name = type(engine).__name__
    if not callable(fn):
        raise TargetError(
            f"{name}.wrap's first argument must be a callable, got {fn!r}. Pass the function to "
            "tap."
        )
    if not isinstance(interceptor, Interceptor):
        raise TargetError(
            f"{name}.wrap's second argument must be an Interceptor, got "
            f"{type(interceptor).__name__}. Build one with "
            "Interceptor({'jax.numpy.dot': handler})."
        )
