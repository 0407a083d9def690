"""Files and folders that appear whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from .errors import StoreError


@contextlib.contextmanager
def appearing(path: Path, overwrite: bool) -> Iterator[Path]:
    """Gives a path to write to beside ``path``, which takes its place when all went well.

    A file that is there is replaced in one step. A folder has to be moved away first, in a step
    of its own.

    Raises:
        StoreError: ``path`` is there and is not to be overwritten, or has no folder to be in.
    """
    if not path.parent.is_dir():
        raise StoreError(f"{path} can't be written: {path.parent} is no folder. Make it first.")
    _check(path, overwrite)
    hidden = f".{path.name}.{uuid.uuid4().hex}"
    new, old = path.with_name(f"{hidden}.new"), path.with_name(f"{hidden}.old")
    try:
        yield new
        _check(path, overwrite)
        _synchronize(new)
        if path.is_dir():
            path.rename(old)
        try:
            os.replace(new, path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        _synchronize_one(path.parent)
    finally:
        # Also what a library left beside, such as orbax's own temporary folder.
        for left in [p for p in path.parent.iterdir() if p.name.startswith(hidden)]:
            remove(left)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _check(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise StoreError(f"{path} is there already. Pass overwrite=True to replace it.")


def _synchronize(path: Path) -> None:
    """Waits until everything is on the disk, so that the new name never stands for less."""
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
