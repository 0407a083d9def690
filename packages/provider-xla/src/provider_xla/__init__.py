"""provider-xla: quantizes the matrix products and convolutions of a JAX program, JIT on.

Importing this package does not import jax, so that plugin discovery stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._errors import QuantizationError, QuantizationWarning
    from ._plan import Plan
    from ._prepacked import PrepackedWeight
    from ._ptq import PtqProvider
    from ._qt import QtProvider
    from ._report import OpRecord, Report
    from ._rules import QtRule, QuantizationRule
    from ._weights import WeightPlan

__all__ = [
    "OpRecord",
    "Plan",
    "PrepackedWeight",
    "PtqProvider",
    "QtProvider",
    "QtRule",
    "QuantizationError",
    "QuantizationRule",
    "QuantizationWarning",
    "Report",
    "WeightPlan",
]

_LAZY = {
    "OpRecord": "_report",
    "Plan": "_plan",
    "PrepackedWeight": "_prepacked",
    "PtqProvider": "_ptq",
    "QtProvider": "_qt",
    "QtRule": "_rules",
    "QuantizationError": "_errors",
    "QuantizationRule": "_rules",
    "QuantizationWarning": "_errors",
    "Report": "_report",
    "WeightPlan": "_weights",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
