"""The contract of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

from .interceptor import Interceptor

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class Engine(Protocol):
    """Runs functions with an interceptor active.

    An engine that follows values through a program, so that ``OpCall.kind``, ``OpCall.proxy`` and
    provenance behind moves are known under ``jit``, has an attribute ``follows_values`` that is
    true. Without one providers treat it as ``PatchEngine``.
    """

    def wrap(self, fn: Callable[P, R], interceptor: Interceptor) -> Callable[P, R]:
        """Returns ``fn``, run with ``interceptor`` active."""
        ...
