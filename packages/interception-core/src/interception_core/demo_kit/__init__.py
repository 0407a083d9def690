"""The kit of providers' demos: digits, training, and command options.

Needs the extra `demo`. Importing this package imports neither jax nor the libraries of the extra.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .shell import configure, print_table, progress, ready, write_json

if TYPE_CHECKING:
    from .digits import BATCH, Digits, train

__all__ = [
    "BATCH",
    "Digits",
    "configure",
    "print_table",
    "progress",
    "ready",
    "train",
    "write_json",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".digits", __name__), name)
