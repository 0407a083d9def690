"""Matrix and quantization kernels for JAX on CPU, warmed up before the first call.

Importing this package does not import jax, so that plugin discovery stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import reference
    from ._activations.activation import activation
    from ._activations.config import ActivationEnum, ActivationParams, ClampedSwigluParams
    from ._activations.ops import act_lu, dact_lu, quantize_dact_dbias
    from ._norms.layernorm import layernorm
    from ._norms.ops import normalization_bwd, normalization_fwd
    from ._stages import Stages, isa, isas, stages, targets, warm_counts
    from ._te.modes import QuantizeLayout, ScalingMode, compute_scale_from_amax
    from ._te.ops_dequantize import dequantize
    from ._te.ops_gemm import gemm_v2
    from ._te.ops_gemm_v1 import gemm
    from ._te.ops_grouped import grouped_quantize
    from ._te.ops_quantize import dbias_quantize
    from ._warmup import export_checks, register, warmup
    from ._weights.pack import pack_w4, pack_w8
    from ._weights.packed import PackedWeight
    from ._weights.products import gemm_w8a8, gemm_w8a16, gemv_w4, gemv_w8

__all__ = [
    "ActivationEnum",
    "ActivationParams",
    "ClampedSwigluParams",
    "PackedWeight",
    "QuantizeLayout",
    "ScalingMode",
    "Stages",
    "act_lu",
    "activation",
    "compute_scale_from_amax",
    "dact_lu",
    "dbias_quantize",
    "dequantize",
    "export_checks",
    "gemm",
    "gemm_v2",
    "gemm_w8a8",
    "gemm_w8a16",
    "gemv_w4",
    "gemv_w8",
    "grouped_quantize",
    "isa",
    "isas",
    "layernorm",
    "normalization_bwd",
    "normalization_fwd",
    "pack_w4",
    "pack_w8",
    "quantize_dact_dbias",
    "reference",
    "register",
    "stages",
    "targets",
    "warm_counts",
    "warmup",
]

_LAZY = {
    "ActivationEnum": "_activations.config",
    "ActivationParams": "_activations.config",
    "ClampedSwigluParams": "_activations.config",
    "PackedWeight": "_weights.packed",
    "QuantizeLayout": "_te.modes",
    "ScalingMode": "_te.modes",
    "Stages": "_stages",
    "act_lu": "_activations.ops",
    "activation": "_activations.activation",
    "compute_scale_from_amax": "_te.modes",
    "dact_lu": "_activations.ops",
    "dbias_quantize": "_te.ops_quantize",
    "dequantize": "_te.ops_dequantize",
    "export_checks": "_warmup",
    "gemm": "_te.ops_gemm_v1",
    "gemm_v2": "_te.ops_gemm",
    "gemm_w8a16": "_weights.products",
    "gemm_w8a8": "_weights.products",
    "gemv_w4": "_weights.products",
    "gemv_w8": "_weights.products",
    "grouped_quantize": "_te.ops_grouped",
    "isa": "_stages",
    "isas": "_stages",
    "layernorm": "_norms.layernorm",
    "normalization_bwd": "_norms.ops",
    "normalization_fwd": "_norms.ops",
    "pack_w4": "_weights.pack",
    "pack_w8": "_weights.pack",
    "quantize_dact_dbias": "_activations.ops",
    "register": "_warmup",
    "stages": "_stages",
    "targets": "_stages",
    "warm_counts": "_stages",
    "warmup": "_warmup",
}


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module(".reference", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
