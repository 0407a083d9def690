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
    from ._attention.ops import fused_attn, fused_attn_bwd, fused_attn_fwd
    from ._attention.sequence import SequenceDescriptor
    from ._attention.types import (
        AttnBiasType,
        AttnMaskType,
        AttnSoftmaxType,
        QKVFormat,
        QKVLayout,
    )
    from ._decode.ops import decode_attention
    from ._norms.layernorm import layernorm
    from ._norms.ops import normalization_bwd, normalization_fwd
    from ._router.ops import (
        fused_topk_with_score_function,
        fused_topk_with_score_function_bwd,
        fused_topk_with_score_function_fwd,
    )
    from ._router.ops_loss import (
        fused_moe_aux_loss,
        fused_moe_aux_loss_bwd,
        fused_moe_aux_loss_fwd,
    )
    from ._router.options import RoutingMapFormat, ScoreFunction
    from ._softmax.checks import SoftmaxFusionType
    from ._softmax.ops import (
        scaled_masked_softmax_bwd,
        scaled_masked_softmax_fwd,
        scaled_softmax_bwd,
        scaled_softmax_fwd,
        scaled_upper_triang_masked_softmax_bwd,
        scaled_upper_triang_masked_softmax_fwd,
        softmax,
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
    from ._weights.take import packed_take

__all__ = [
    "ActivationEnum",
    "ActivationParams",
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "ClampedSwigluParams",
    "PackedWeight",
    "QKVFormat",
    "QKVLayout",
    "QuantizeLayout",
    "RoutingMapFormat",
    "ScalingMode",
    "ScoreFunction",
    "SequenceDescriptor",
    "SoftmaxFusionType",
    "Stages",
    "act_lu",
    "activation",
    "compute_scale_from_amax",
    "dact_lu",
    "dbias_quantize",
    "decode_attention",
    "dequantize",
    "export_checks",
    "fused_attn",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "fused_moe_aux_loss",
    "fused_moe_aux_loss_bwd",
    "fused_moe_aux_loss_fwd",
    "fused_topk_with_score_function",
    "fused_topk_with_score_function_bwd",
    "fused_topk_with_score_function_fwd",
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
    "packed_take",
    "quantize_dact_dbias",
    "reference",
    "register",
    "scaled_masked_softmax_bwd",
    "scaled_masked_softmax_fwd",
    "scaled_softmax_bwd",
    "scaled_softmax_fwd",
    "scaled_upper_triang_masked_softmax_bwd",
    "scaled_upper_triang_masked_softmax_fwd",
    "softmax",
    "stages",
    "targets",
    "warm_counts",
    "warmup",
]

_LAZY = {
    "ActivationEnum": "_activations.config",
    "ActivationParams": "_activations.config",
    "ClampedSwigluParams": "_activations.config",
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
    "RoutingMapFormat": "_router.options",
    "ScalingMode": "_te.modes",
    "ScoreFunction": "_router.options",
    "SoftmaxFusionType": "_softmax.checks",
    "Stages": "_stages",
    "act_lu": "_activations.ops",
    "activation": "_activations.activation",
    "compute_scale_from_amax": "_te.modes",
    "dact_lu": "_activations.ops",
    "dbias_quantize": "_te.ops_quantize",
    "decode_attention": "_decode.ops",
    "dequantize": "_te.ops_dequantize",
    "export_checks": "_warmup",
    "fused_moe_aux_loss": "_router.ops_loss",
    "fused_moe_aux_loss_bwd": "_router.ops_loss",
    "fused_moe_aux_loss_fwd": "_router.ops_loss",
    "fused_topk_with_score_function": "_router.ops",
    "fused_topk_with_score_function_bwd": "_router.ops",
    "fused_topk_with_score_function_fwd": "_router.ops",
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
    "packed_take": "_weights.take",
    "quantize_dact_dbias": "_activations.ops",
    "register": "_warmup",
    "scaled_masked_softmax_bwd": "_softmax.ops",
    "scaled_masked_softmax_fwd": "_softmax.ops",
    "scaled_softmax_bwd": "_softmax.ops",
    "scaled_softmax_fwd": "_softmax.ops",
    "scaled_upper_triang_masked_softmax_bwd": "_softmax.ops",
    "scaled_upper_triang_masked_softmax_fwd": "_softmax.ops",
    "softmax": "_softmax.ops",
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
