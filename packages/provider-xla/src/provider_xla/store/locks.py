"""Locks: distinguish files being written from leftovers of killed processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where leftovers are not removed
    fcntl = None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file that the system releases when the process ends."""
    with path.open("xb") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_stale(path: Path) -> None:
    """Remove leftovers of dead writers next to ``path``."""
    if fcntl is None:
        return
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{32}}\.lock")
    for lock in [p for p in path.parent.iterdir() if pattern.fullmatch(p.name)]:
        with contextlib.suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the writer is alive
            _remove(path, lock)


def _remove(path: Path, lock: Path) -> None:
    """Remove a lock's files, the lock last; restore what was replaced."""
    hidden = lock.name.removesuffix("lock")
    for left in [p for p in lock.parent.iterdir() if p.name.startswith(hidden) and p != lock]:
        if left.name.endswith(".old") and not os.path.lexists(path):
            left.rename(path)
        elif left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
    os.unlink(lock)
