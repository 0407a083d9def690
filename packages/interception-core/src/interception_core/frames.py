"""Frames: errors and operations show the program's source lines, not those of a package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from . import _compat

P = ParamSpec("P")
R = TypeVar("R")


def hide_frames(folder: str | Path) -> None:
    """Hide a package's frames as JAX hides its own.

    Operations then have the source line of the program that the package traces. Tracebacks of
    errors that go through a function of ``hides_frames``, or through a function of JAX such as
    ``jax.jit``, leave the package's frames out, unless ``JAX_TRACEBACK_FILTERING=off`` is set.

    Args:
        folder: of the package: ``Path(__file__).parent``.
    """
    _compat.hide_frames(str(folder))


def hides_frames(fn: Callable[P, R]) -> Callable[P, R]:
    """Return ``fn``, whose errors have a traceback without hidden frames.

    Put it on functions that users call and that call users' functions. Nested ones cost nothing:
    the outermost shortens the traceback.

    Args:
        fn: the function.
    """
    return _compat.hides_frames(fn)
