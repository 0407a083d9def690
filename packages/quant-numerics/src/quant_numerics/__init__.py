"""Quantized arrays, and quantized dot_general, einsum and convolution, as pure JAX functions.

Importing this package does not import jax, so that its plugin module is found quickly. The first
use of a public name imports `api`.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("quant-numerics")

if TYPE_CHECKING:
    from quant_numerics.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = importlib.import_module("quant_numerics.api")
    if name != "__all__" and name not in api.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("quant_numerics.api").__all__})
