"""What is told while a program runs: logs, bars of progress, and what takes long.

Nothing is logged unless a program configures `logging`. With `JAXTAP_DEBUG=1` all logs of the
logger `jaxtap` and those below it go to stderr.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

DEBUG = "JAXTAP_DEBUG"

T = TypeVar("T")


def logger(part: str) -> logging.Logger:
    """Return the logger of a part of jaxtap, such as `jaxtap.plugins`.

    Args:
        part: the name below `jaxtap`. Packages with a plugin take the plugin's name.
    """
    return logging.getLogger(f"jaxtap.{part}")


def is_debug(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `JAXTAP_DEBUG` asks for logs and tracebacks."""
    return environ.get(DEBUG, "") not in ("", "0")


def log_to_stderr() -> None:
    """Print all logs of jaxtap to stderr. A second call does nothing."""
    root = logging.getLogger("jaxtap")
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)6d ms %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)


class _NoBar(Generic[T]):
    """What is used of a bar, without one."""

    def __init__(self, steps: Iterable[T] | None):
        self._steps = steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __iter__(self) -> Iterator[T]:
        return iter(self._steps or ())

    def update(self, count: int = 1) -> None:
        """Show nothing."""


def progress(steps: Iterable[T] | None = None, **how: Any) -> Any:
    """Return a bar of progress on terminals, by tqdm if it is installed; else one without a bar.

    Args:
        steps: what is iterated over; None where steps are told by `update`.
        how: as tqdm takes it.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return _NoBar(steps)
    return tqdm(steps, disable=None, **how)


SECONDS = 0.5
"""What is done by then is not told."""


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Print a line to stderr, if that is a terminal and the work is not done soon."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(SECONDS, print, (what,), {"file": sys.stderr, "flush": True})
    timer.daemon = True  # a program that ends does not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if is_debug():
    log_to_stderr()
