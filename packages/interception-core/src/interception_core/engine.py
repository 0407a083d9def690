"""Engine: the protocol of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

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
