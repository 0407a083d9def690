"""Several processes that write one folder, with shared errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .errors import StoreError
from .files import appearing


def tell_all(value: Any) -> list[Any]:
    """Tell all processes a JSON value; return all values in order."""
    if jax.process_count() == 1:
        return [value]
    # Processes can only gather arrays of equal shapes: bytes, filled up to the longest.
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(data.size, np.int32))
    filled = np.zeros(int(np.max(sizes)), np.uint8)
    filled[: data.size] = data
    found = np.asarray(multihost_utils.process_allgather(filled))
    lines = found.reshape(jax.process_count(), -1)
    return [
        json.loads(line[: int(size)].tobytes())
        for line, size in zip(lines, np.ravel(sizes), strict=True)
    ]


def step(what: str, run: Callable[[], Any]) -> list[Any]:
    """Run a step in each process, and return all results.

    Raises:
        StoreError: the step failed in another process. The process where it failed raises the error
            itself.
    """
    result, error = None, None
    try:
        result = run()
    except Exception as caught:
        error = caught
    found = tell_all([result, None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for process, (_, failed) in enumerate(found):
        if failed is not None:
            raise StoreError(f"{what} failed in process {process}: {failed}")
    return [value for value, _ in found]


@contextlib.contextmanager
def appearing_in_all(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield one folder to all processes, which replaces ``path`` at the end.

    Process 0 makes the folder; see ``appearing``.
    """
    with contextlib.ExitStack() as stack:

        def begin() -> str | None:
            if jax.process_index():
                return None
            new = stack.enter_context(appearing(path, overwrite))
            new.mkdir()
            return str(new)

        new = step(f"Writing {path}", begin)[0]
        try:
            yield Path(new)
        except BaseException as error:
            if not stack.__exit__(type(error), error, error.__traceback__):
                raise
            return
        step(f"Writing {path}", stack.close)
