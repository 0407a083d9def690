"""cuBLASLt, from where JAX's CUDA plugin has it: the package nvidia-cublas, or else the system."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from ._status import native

_NAME = "libcublasLt.so.13"


@functools.cache
def missing() -> str | None:
    """Loads cuBLASLt. Returns why that failed, or None."""
    errors = []
    for path in [*_installed(), _NAME]:
        version, error = native().load_cublaslt(str(path))
        if version:
            return None
        errors.append(error)
    return f"cuBLASLt can't be loaded; install nvidia-cublas ({'; '.join(errors)})"


def _installed() -> list[Path]:
    """Where nvidia-cublas has the library."""
    try:
        found = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return []
    folders = found.submodule_search_locations if found else None
    paths = [Path(folder) / "lib" / _NAME for folder in folders or ()]
    return [path for path in paths if path.exists()]
