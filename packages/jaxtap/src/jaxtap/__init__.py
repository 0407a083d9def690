"""jaxtap: quantizes any JAX program without touching its source.

``import jaxtap as jt`` has what most programs need, and imports a package, and jax, when a name of
it is first used. What each name does is in the package that it comes from: ``provider_xla``,
``provider_odml``, ``quant_numerics``, ``hijax_trace``, ``interception_core``, ``te_ffi_kernels``.
"""

import importlib
from importlib.metadata import version
from typing import Any

from ._needs import needed

__version__ = version("jaxtap")

_XLA = (
    *("CacheRule", "Gradient", "Lora", "Plan", "Presets", "PtqProvider", "Q", "QtProvider"),
    *("QtRule", "QuantizationError", "QuantizationRule", "QuantizationWarning", "Rule", "Static"),
    *("StoreError", "calibrate_model", "load", "load_exported", "load_model", "merge_model"),
    *("model_plan", "presets", "quantize_file", "quantize_model", "quantize_params", "save"),
    *("save_model",),
)
_HERE = ("get_provider", "plan", "providers", "report", "train")
_MODULES = ("gguf", "huggingface", "llm", "lora", "odml", "optim", "passes")

__all__ = sorted((*_XLA, *_HERE, *_MODULES))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HERE:
        value = getattr(importlib.import_module(f"{__name__}.programs"), name)
    elif name in _XLA:
        value = getattr(needed("provider_xla", "xla", f"jaxtap.{name}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
