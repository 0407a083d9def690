"""provider-xla: quantizes the matmuls and convolutions of a JAX program, JIT on.

Importing this package does not import jax, so that plugin discovery stays light.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("provider-xla")

if TYPE_CHECKING:
    from .bridges.bridge import Bridge, Quantized
    from .bridges.export import export_model, model_parameters
    from .bridges.model import calibrate_model, merge_model, model_plan, quantize_model
    from .cache.array import CacheArray
    from .cache.plan import CachePlan
    from .cache.rule import CacheRule
    from .errors import QuantizationError, QuantizationWarning
    from .export.program import ExportedProgram, load_exported
    from .formats.compressed_tensors import load_compressed_tensors, save_compressed_tensors
    from .formats.gguf import load_gguf, read_gguf_metadata, save_gguf
    from .formats.names import Target
    from .formats.rules import rules_of
    from .kernels.packed import PrepackedWeight
    from .lora.weight import AdaptedWeight, adapter_mask
    from .passes.awq import Awq
    from .passes.base import Pass
    from .passes.gptq import Gptq
    from .passes.optimize import Optimized
    from .passes.report import PassReport
    from .passes.rotation import Hadamard
    from .passes.smoothquant import SmoothQuant
    from .passes.wanda import Wanda
    from .plan.allocation import AllocatedWeight, Allocation
    from .plan.lora import LoraPlan
    from .plan.weight import WeightPlan
    from .program.record import OpRecord, Report
    from .providers.plan import Plan
    from .providers.ptq import PtqProvider
    from .providers.qt import QtProvider
    from .report.quality import QualityReport
    from .rules.qt_rule import QtRule
    from .rules.rule import QuantizationRule
    from .run.affine import AffineWeight
    from .run.transformed import TransformedWeight
    from .store.errors import StoreError, StoreMismatchError
    from .store.float_files import Source
    from .store.load import load, load_extra, read_manifest
    from .store.manifest import Manifest
    from .store.plan_diff import PlanDiff
    from .store.quantize_file import quantize_file
    from .store.save import save

__all__ = [
    "AdaptedWeight",
    "AffineWeight",
    "AllocatedWeight",
    "Allocation",
    "Awq",
    "Bridge",
    "CacheArray",
    "CachePlan",
    "CacheRule",
    "ExportedProgram",
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
    "Target",
    "TransformedWeight",
    "Wanda",
    "WeightPlan",
    "adapter_mask",
    "calibrate_model",
    "export_model",
    "load",
    "load_compressed_tensors",
    "load_exported",
    "load_extra",
    "load_gguf",
    "merge_model",
    "model_parameters",
    "model_plan",
    "quantize_file",
    "quantize_model",
    "read_gguf_metadata",
    "read_manifest",
    "rules_of",
    "save",
    "save_compressed_tensors",
    "save_gguf",
]

_LAZY = {
    "AdaptedWeight": "lora.weight",
    "Bridge": "bridges.bridge",
    "AffineWeight": "run.affine",
    "AllocatedWeight": "plan.allocation",
    "Allocation": "plan.allocation",
    "Awq": "passes.awq",
    "CacheArray": "cache.array",
    "CachePlan": "cache.plan",
    "CacheRule": "cache.rule",
    "ExportedProgram": "export.program",
    "Gptq": "passes.gptq",
    "Hadamard": "passes.rotation",
    "LoraPlan": "plan.lora",
    "Manifest": "store.manifest",
    "OpRecord": "program.record",
    "Optimized": "passes.optimize",
    "Pass": "passes.base",
    "PassReport": "passes.report",
    "Plan": "providers.plan",
    "PlanDiff": "store.plan_diff",
    "PrepackedWeight": "kernels.packed",
    "PtqProvider": "providers.ptq",
    "QtProvider": "providers.qt",
    "QtRule": "rules.qt_rule",
    "QualityReport": "report.quality",
    "QuantizationError": "errors",
    "QuantizationRule": "rules.rule",
    "QuantizationWarning": "errors",
    "Quantized": "bridges.bridge",
    "Report": "program.record",
    "SmoothQuant": "passes.smoothquant",
    "Source": "store.float_files",
    "StoreError": "store.errors",
    "StoreMismatchError": "store.errors",
    "Target": "formats.names",
    "TransformedWeight": "run.transformed",
    "Wanda": "passes.wanda",
    "WeightPlan": "plan.weight",
    "adapter_mask": "lora.weight",
    "calibrate_model": "bridges.model",
    "export_model": "bridges.export",
    "load": "store.load",
    "load_compressed_tensors": "formats.compressed_tensors",
    "load_exported": "export.program",
    "load_extra": "store.load",
    "load_gguf": "formats.gguf",
    "merge_model": "bridges.model",
    "model_parameters": "bridges.export",
    "model_plan": "bridges.model",
    "quantize_file": "store.quantize_file",
    "quantize_model": "bridges.model",
    "read_gguf_metadata": "formats.gguf",
    "read_manifest": "store.load",
    "rules_of": "formats.rules",
    "save": "store.save",
    "save_compressed_tensors": "formats.compressed_tensors",
    "save_gguf": "formats.gguf",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
