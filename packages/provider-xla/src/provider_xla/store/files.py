"""Files and folders that appear whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ..errors import StoreError

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


@contextlib.contextmanager
def atomic_write(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success.

    An existing file is replaced in one step; an existing folder is moved away first, in another
    step. If several processes write to one path without ``overwrite``, one of them succeeds. If a
    process is killed while it writes, the next one that writes to ``path`` removes what it left.

    Raises:
        StoreError: ``path`` exists and is not to be overwritten; its folder doesn't exist; or the
            system can't write, for lack of space or of rights.
    """
    if not path.parent.is_dir():
        raise StoreError(f"{path} can't be written: {path.parent} is not a folder. Make it first.")
    _check(path, overwrite)
    try:
        remove_stale(path)
        hidden = f".{path.name}.{uuid.uuid4().hex}"
        new, old = path.with_name(f"{hidden}.new"), path.with_name(f"{hidden}.old")
        try:
            with locked(path.with_name(f"{hidden}.lock")):
                yield new
                _check(path, overwrite)
                _synchronize(new)
                if overwrite:
                    _replace(new, path, old)
                else:
                    _take(new, path)
                _synchronize_one(path.parent)
        finally:
            # Also what a library left there, such as orbax's temporary folder.
            for left in [p for p in path.parent.iterdir() if p.name.startswith(hidden)]:
                remove(left)
    except OSError as error:
        raise StoreError(
            f"{path} can't be written: {error}. Make space or choose another "
            "folder; what was there is as it was."
        ) from error


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _replace(new: Path, path: Path, old: Path) -> None:
    """Move the new file to its place, replacing an old one."""
    if path.is_dir() or (new.is_dir() and os.path.lexists(path)):
        path.rename(old)
    try:
        os.replace(new, path)
    except BaseException:
        if os.path.lexists(old):
            old.rename(path)
        raise


def _take(new: Path, path: Path) -> None:
    """Move the new file to a name that must be free, in one step."""
    try:
        if new.is_dir():
            os.rename(new, path)  # fails if a folder with files is there
        else:
            try:
                os.link(new, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                _check(path, overwrite=False)
                os.replace(new, path)
    except OSError:
        _check(path, overwrite=False)
        raise


def _check(path: Path, overwrite: bool) -> None:
    # lexists: a link to nothing counts as being there.
    if os.path.lexists(path) and not overwrite:
        raise StoreError(f"{path} already exists. Pass overwrite=True to replace it.")


def _synchronize(path: Path) -> None:
    """Flush to disk, so that the final name never holds a part."""
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                _synchronize_one(Path(folder) / name)
            _synchronize_one(Path(folder))
    else:
        _synchronize_one(path)


def _synchronize_one(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # folders, on some systems
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
