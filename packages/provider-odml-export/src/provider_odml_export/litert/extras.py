"""Imports of the extras' libraries, made where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import MissingExtraError


def require(module: str, extra: str = "litert") -> Any:
    """Imports a module of an extra.

    Args:
        module: its full name.
        extra: the extra that brings it, such as "litert".

    Returns:
        The module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # What is missing inside an installed library is its fault, not a missing extra.
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        raise MissingExtraError(top, extra) from error
