"""Tell on a terminal what takes long and has no steps to show a bar of."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

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
