"""What commands print and write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from interception_core import JaxtapError


def check_has(found: Any, name: str, what: str) -> None:
    """Raise JaxtapError where a provider's plan or report lacks an optional method."""
    if not hasattr(found, name):
        raise JaxtapError(
            f"{what} needs {name}(), got a {type(found).__name__} without. See "
            "interception_core.ProviderPlan."
        )


def check_folders(*paths: Any) -> None:
    """Raise JaxtapError where a file has no folder to be written into."""
    for path in paths:
        if path is not None and str(path) != "-" and not Path(path).parent.is_dir():
            raise JaxtapError(
                f"There is no folder {Path(path).parent} to write {Path(path).name} into."
            )


def written(path: Any, save: Callable[[Any], None], quiet: bool = False) -> None:
    """Write a file by ``save``, and say so.

    Raises:
        JaxtapError: it can't be written.
    """
    try:
        save(path)
    except OSError as error:
        raise JaxtapError(f"{path} can't be written: {error}") from error
    if not quiet:
        print(f"Wrote {path}.")


def write_whole(path: str | Path, text: str) -> None:
    """Write under a temporary name, so that ``path`` is whole or absent."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
