"""provider-odml: train any JAX program for LiteRT, and export a verified .tflite.

Importing this package does not import jax, so that plugin discovery stays light.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("provider-odml")

if TYPE_CHECKING:
    from quant_numerics import MovingAverage

    from .decide.plan import Plan
    from .decide.rules import OdmlRule
    from .errors import (
        ConversionError,
        ManifestError,
        MismatchError,
        MissingExtraError,
        OdmlError,
        OdmlWarning,
    )
    from .exporting.artifact import Artifact
    from .exporting.backend import ExportBackend, FloatFile, QuantizedFile
    from .exporting.conversion import OdmlConversionProvider
    from .exporting.export import export
    from .exporting.match import FileOp
    from .exporting.report import Report
    from .exporting.signature import Signature
    from .train.provider import OdmlQatProvider, QatModel, qat
    from .train.refine import refine
    from .train.statistics import QuantStats

__all__ = [
    "Artifact",
    "ConversionError",
    "ExportBackend",
    "FileOp",
    "FloatFile",
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
    "QuantizedFile",
    "Report",
    "Signature",
    "export",
    "qat",
    "refine",
]

_LAZY = {
    "Artifact": ".exporting.artifact",
    "ConversionError": ".errors",
    "ExportBackend": ".exporting.backend",
    "FileOp": ".exporting.match",
    "FloatFile": ".exporting.backend",
    "ManifestError": ".errors",
    "MismatchError": ".errors",
    "MissingExtraError": ".errors",
    "MovingAverage": "quant_numerics",
    "OdmlConversionProvider": ".exporting.conversion",
    "OdmlError": ".errors",
    "OdmlQatProvider": ".train.provider",
    "OdmlRule": ".decide.rules",
    "OdmlWarning": ".errors",
    "Plan": ".decide.plan",
    "QatModel": ".train.provider",
    "QuantizedFile": ".exporting.backend",
    "QuantStats": ".train.statistics",
    "Report": ".exporting.report",
    "Signature": ".exporting.signature",
    "export": ".exporting.export",
    "qat": ".train.provider",
    "refine": ".train.refine",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
