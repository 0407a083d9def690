"""Matrix and quantization kernels for JAX on CPU, warmed up before use.

Importing this package does not import jax, so that plugin discovery stays light. ``__init__.pyi``
lists the public names and their modules, for this module and for type checkers.
"""

import ast
import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

__version__ = version("te-ffi-kernels")

_FROM = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(statement, ast.ImportFrom) and statement.level
    for alias in statement.names
}
__all__ = sorted(_FROM)  # pyrefly: ignore


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _FROM[name] or name
    found = importlib.import_module(f".{module}", __name__)
    value = globals()[name] = found if _FROM[name] is None else getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
