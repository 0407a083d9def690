"""Programs on the command line: ``FILE:FUNCTION`` and its arguments.

For commands that take a program, such as ``jaxtap trace model.py:forward params 'f32[8,64]'``.
Importing this module does not import jax.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import JaxtapError

__all__ = ["find_function", "read_argument"]

_TYPE = re.compile(r"([a-z]+[0-9]*[a-z0-9_]*)\[([0-9, ]*)\]")
_SHORT = {"f": "float", "i": "int", "u": "uint", "c": "complex", "bf": "bfloat"}


def find_function(given: str) -> tuple[ModuleType, Callable[..., Any]]:
    """Import a file. Return its module and one of its functions.

    Args:
        given: ``FILE:FUNCTION``.

    Raises:
        JaxtapError: the file does not exist, can't be imported, or does not have the function.
    """
    path, _, name = given.rpartition(":")
    module = _load(path, given)
    fn = getattr(module, name, None)
    if not callable(fn):
        known = ", ".join(key for key, value in vars(module).items() if callable(value)) or "none"
        raise JaxtapError(
            f"FUNCTION must be a function in {path}, got {name!r}. Name one of: {known}."
        )
    return module, fn


def _load(path: str, given: str) -> ModuleType:
    file = Path(path)
    if not path and Path(given).is_file():
        raise JaxtapError(
            f"The program must be FILE:FUNCTION, got {given!r}, where the function is missing. "
            f"Write for example {given}:forward."
        )
    if not path or not file.is_file():
        raise JaxtapError(
            f"The program must be FILE:FUNCTION with an existing file, got {given!r}. Write for "
            "example model.py:forward."
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise JaxtapError(f"FILE must be a Python file, got {path}. Name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise JaxtapError(
            f"FILE must be importable, got {path}, which raises {type(error).__name__}: {error}. "
            "Run it with Python to see where."
        ) from error
    return module


def read_argument(text: str, module: ModuleType) -> Any:
    """Return an argument that is given as text.

    Args:
        text: a type such as ``f32[8,64]``, or an expression of names in the file.

    Returns:
        A ``jax.ShapeDtypeStruct``, or the value of the expression.

    Raises:
        JaxtapError: it is neither.
    """
    import jax
    import jax.numpy as jnp

    match = _TYPE.fullmatch(text)
    if match is not None:
        short, shape = match.groups()
        kind, bits = re.fullmatch(r"([a-z]+)(.*)", short).groups()  # type: ignore[union-attr]
        dtype = _SHORT.get(kind, kind) + bits
        if hasattr(jnp, dtype):
            sizes = [int(size) for size in shape.split(",") if size.strip()]
            return jax.ShapeDtypeStruct(tuple(sizes), getattr(jnp, dtype))
    try:
        return eval(text, vars(module))
    except Exception as error:
        raise JaxtapError(
            f"An argument must be a type or an expression of names in {module.__name__}.py, got "
            f"{text!r}, which raises {type(error).__name__}: {error}. Write for example "
            "'f32[8,64]' or 'params'."
        ) from error
