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
    """Imports a file and returns it with a function of it.

    Args:
        given: ``FILE:FUNCTION``.

    Raises:
        JaxtapError: there is no such file, it can't be imported, or has no such function; names
            those that it has.
    """
    path, _, name = given.rpartition(":")
    module = _load(path, given)
    fn = getattr(module, name, None)
    if not callable(fn):
        known = ", ".join(key for key, value in vars(module).items() if callable(value)) or "none"
        raise JaxtapError(f"{path} has no function {name!r}. It has: {known}.")
    return module, fn


def _load(path: str, given: str) -> ModuleType:
    file = Path(path)
    if not path and Path(given).is_file():
        raise JaxtapError(
            f"{given} is a file, and the function of it is missing. Write FILE:FUNCTION, such as "
            f"{given}:forward."
        )
    if not path or not file.is_file():
        raise JaxtapError(
            f"{given!r} names no file. Write FILE:FUNCTION, such as model.py:forward."
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise JaxtapError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise JaxtapError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    return module


def read_argument(text: str, module: ModuleType) -> Any:
    """Returns an argument that is given as text.

    Args:
        text: a type such as ``f32[8,64]``, or an expression on what the file defines.
        module: the file.

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
            f"The argument {text!r} is neither a type such as 'f32[8,64]' nor an expression on "
            f"what {module.__name__}.py defines: {type(error).__name__}: {error}"
        ) from error
