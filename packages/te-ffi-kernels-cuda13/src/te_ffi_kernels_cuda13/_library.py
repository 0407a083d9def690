"""Where NVIDIA's packages have their libraries, which JAX's CUDA plugin uses too."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

Load = Callable[[str], tuple[int, str]]


def load(load_one: Load, package: str, name: str) -> tuple[int, str]:
    """Load a library: that of a package, or else the system's.

    Args:
        load_one: given a path or a name, returns the library's version and what went wrong.
        package: that has it, as Python imports it.
        name: the file's.

    Returns:
        The version, or 0 and what went wrong.
    """
    errors = []
    for path in [*installed(package, name), name]:
        version, error = load_one(str(path))
        if version:
            return version, ""
        errors.append(error)
    return 0, "; ".join(errors)


def installed(package: str, name: str) -> list[Path]:
    """Where a package has a library."""
    try:
        found: Any = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    folders = found.submodule_search_locations if found else None
    paths = [Path(folder) / "lib" / name for folder in folders or ()]
    return [path for path in paths if path.exists()]
