"""provider-xla: quantizes the matrix products and convolutions of a JAX program, JIT on.

Importing this package does not import jax, so that plugin discovery stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._adapters.adapter import Adapter, Quantized
    from ._adapters.model import calibrate_model, model_plan, quantize_model
    from ._allocate import AllocatedWeight, Allocation
    from ._errors import QuantizationError, QuantizationWarning
    from ._lora import LoraPlan
    from ._passes import Awq, Gptq, Hadamard, Optimized, Pass, PassReport, SmoothQuant, Wanda
    from ._plan import Plan
    from ._prepacked import PrepackedWeight
    from ._ptq import PtqProvider
    from ._qt import QtProvider
    from ._quality import QualityReport
    from ._report import OpRecord, Report
    from ._rules import QtRule, QuantizationRule
    from ._store import (
        Manifest,
        PlanDiff,
        Source,
        StoreError,
        StoreMismatchError,
        load,
        load_extra,
        quantize_file,
        read_manifest,
        save,
    )
    from ._transformed import TransformedWeight
    from ._weights import WeightPlan

__all__ = [
    "Adapter",
    "AllocatedWeight",
    "Allocation",
    "Awq",
    "Gptq",
    "Hadamard",
    "LoraPlan",
    "Manifest",
    "OpRecord",
    "Optimized",
    "Pass",
    "PassReport",
    "Plan",
    "PlanDiff",
    "PrepackedWeight",
    "PtqProvider",
    "QtProvider",
    "QtRule",
    "QualityReport",
    "QuantizationError",
    "QuantizationRule",
    "QuantizationWarning",
    "Quantized",
    "Report",
    "SmoothQuant",
    "Source",
    "StoreError",
    "StoreMismatchError",
    "TransformedWeight",
    "Wanda",
    "WeightPlan",
    "calibrate_model",
    "load",
    "load_extra",
    "model_plan",
    "quantize_file",
    "quantize_model",
    "read_manifest",
    "save",
]

_LAZY = {
    "Adapter": "_adapters.adapter",
    "AllocatedWeight": "_allocate",
    "Allocation": "_allocate",
    "Awq": "_passes",
    "Gptq": "_passes",
    "Hadamard": "_passes",
    "LoraPlan": "_lora",
    "Manifest": "_store",
    "OpRecord": "_report",
    "Optimized": "_passes",
    "Pass": "_passes",
    "PassReport": "_passes",
    "Plan": "_plan",
    "PlanDiff": "_store",
    "PrepackedWeight": "_prepacked",
    "PtqProvider": "_ptq",
    "QtProvider": "_qt",
    "QtRule": "_rules",
    "QualityReport": "_quality",
    "QuantizationError": "_errors",
    "QuantizationRule": "_rules",
    "QuantizationWarning": "_errors",
    "Quantized": "_adapters.adapter",
    "Report": "_report",
    "SmoothQuant": "_passes",
    "Source": "_store",
    "StoreError": "_store",
    "StoreMismatchError": "_store",
    "TransformedWeight": "_transformed",
    "Wanda": "_passes",
    "WeightPlan": "_weights",
    "calibrate_model": "_adapters.model",
    "load": "_store",
    "load_extra": "_store",
    "model_plan": "_adapters.model",
    "quantize_file": "_store",
    "quantize_model": "_adapters.model",
    "read_manifest": "_store",
    "save": "_store",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
