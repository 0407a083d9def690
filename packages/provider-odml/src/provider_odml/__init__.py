"""provider-odml: train any JAX program for LiteRT, and export a verified .tflite.

Importing this package does not import jax, so that plugin discovery stays light.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("provider-odml")

if TYPE_CHECKING:
    from quant_numerics import MovingAverage

    from ._errors import (
        ConversionError,
        ManifestError,
        MismatchError,
        MissingExtraError,
        OdmlError,
        OdmlWarning,
    )
    from ._export._aeq_options import AeqOptions
    from ._export._artifact import Artifact
    from ._export._conversion import OdmlConversionProvider
    from ._export._export import export
    from ._export._report import Report
    from ._export._signature import Signature
    from ._plan import Plan
    from ._provider import OdmlQatProvider, QatModel, qat
    from ._rules import OdmlRule
    from ._statistics import QuantStats

__all__ = [
    "AeqOptions",
    "Artifact",
    "ConversionError",
    "ManifestError",
    "MismatchError",
    "MissingExtraError",
    "MovingAverage",
    "OdmlConversionProvider",
    "OdmlError",
    "OdmlQatProvider",
    "OdmlRule",
    "OdmlWarning",
    "Plan",
    "QatModel",
    "QuantStats",
    "Report",
    "Signature",
    "export",
    "qat",
]

_LAZY = {
    "AeqOptions": "._export._aeq_options",
    "Artifact": "._export._artifact",
    "ConversionError": "._errors",
    "ManifestError": "._errors",
    "MismatchError": "._errors",
    "MissingExtraError": "._errors",
    "MovingAverage": "quant_numerics",
    "OdmlConversionProvider": "._export._conversion",
    "OdmlError": "._errors",
    "OdmlQatProvider": "._provider",
    "OdmlRule": "._rules",
    "OdmlWarning": "._errors",
    "Plan": "._plan",
    "QatModel": "._provider",
    "QuantStats": "._statistics",
    "Report": "._export._report",
    "Signature": "._export._signature",
    "export": "._export._export",
    "qat": "._provider",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
