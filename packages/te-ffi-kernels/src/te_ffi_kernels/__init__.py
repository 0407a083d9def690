"""Matrix and quantization kernels for JAX on CPU, warmed up before the first call.

Importing this package does not import jax, so that plugin discovery stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import reference
    from ._attention.ops import fused_attn, fused_attn_bwd, fused_attn_fwd
    from ._attention.sequence import SequenceDescriptor
    from ._attention.types import (
        AttnBiasType,
        AttnMaskType,
        AttnSoftmaxType,
        QKVFormat,
        QKVLayout,
    )
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
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "PackedWeight",
    "QKVFormat",
    "QKVLayout",
    "QuantizeLayout",
    "ScalingMode",
    "SequenceDescriptor",
    "Stages",
    "compute_scale_from_amax",
    "dbias_quantize",
    "dequantize",
    "export_checks",
    "fused_attn",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "gemm",
    "gemm_v2",
    "gemm_w8a8",
    "gemm_w8a16",
    "gemv_w4",
    "gemv_w8",
    "grouped_quantize",
    "isa",
    "isas",
    "pack_w4",
    "pack_w8",
    "reference",
    "register",
    "stages",
    "targets",
    "warm_counts",
    "warmup",
]

_LAZY = {
    "AttnBiasType": "_attention.types",
    "AttnMaskType": "_attention.types",
    "AttnSoftmaxType": "_attention.types",
    "QKVFormat": "_attention.types",
    "QKVLayout": "_attention.types",
    "SequenceDescriptor": "_attention.sequence",
    "fused_attn": "_attention.ops",
    "fused_attn_bwd": "_attention.ops",
    "fused_attn_fwd": "_attention.ops",
    "PackedWeight": "_weights.packed",
    "QuantizeLayout": "_te.modes",
    "ScalingMode": "_te.modes",
    "Stages": "_stages",
    "compute_scale_from_amax": "_te.modes",
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
    "pack_w4": "_weights.pack",
    "pack_w8": "_weights.pack",
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
