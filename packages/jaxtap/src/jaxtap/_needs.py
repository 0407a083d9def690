"""Packages that extras bring, imported when they are needed."""

import importlib
from types import ModuleType


def needed(package: str, extra: str, what: str) -> ModuleType:
    """Return a package.

    Raises:
        ImportError: it is not installed; says which extra brings it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"{what} needs {package.replace('_', '-')}, which is not installed. Run "
            f'pip install "jaxtap[{extra}]".'
        ) from error
