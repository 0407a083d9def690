"""provider-xla: runs the matrix products and convolutions of a JAX program in int8, JIT on.

Importing this package does not import jax, so that plugin discovery stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._provider import PtqProvider
    from ._report import OpRecord, Report
    from ._rules import QuantizationRule

__all__ = ["OpRecord", "PtqProvider", "QuantizationRule", "Report"]

_LAZY = {
    "OpRecord": "_report",
    "PtqProvider": "_provider",
    "QuantizationRule": "_rules",
    "Report": "_report",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
