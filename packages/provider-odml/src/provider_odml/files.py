"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def save(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file under a temporary name beside it, then renames it.

    Args:
        path: where to; what is there is replaced.
        data: the bytes.

    Returns:
        The path.

    Raises:
        OSError: it cannot be written; then what was at `path` is as it was.
    """
    path = Path(path)
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are for the owner alone; this one gets what open() would have given.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def _umask() -> int:
    # Read by setting it: no other way is portable.
    value = os.umask(0)
    os.umask(value)
    return value
