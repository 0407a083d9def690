"""Every op in plain JAX, with the same signature: what kernels are compared with.

They are also what runs on a platform without a kernel.
"""

from te_ffi_kernels._activations.reference import (
    act_lu,
    activation,
    dact_lu,
    quantize_dact_dbias,
)
from te_ffi_kernels._attention.reference import fused_attn, fused_attn_bwd, fused_attn_fwd
from te_ffi_kernels._decode.reference import decode_attention
from te_ffi_kernels._norms.reference import layernorm, normalization_bwd, normalization_fwd
from te_ffi_kernels._router.reference import (
    fused_moe_aux_loss,
    fused_moe_aux_loss_bwd,
    fused_moe_aux_loss_fwd,
    fused_topk_with_score_function,
    fused_topk_with_score_function_bwd,
    fused_topk_with_score_function_fwd,
)
from te_ffi_kernels._softmax.reference import (
    scaled_masked_softmax_bwd,
    scaled_masked_softmax_fwd,
    scaled_softmax_bwd,
    scaled_softmax_fwd,
    scaled_upper_triang_masked_softmax_bwd,
    scaled_upper_triang_masked_softmax_fwd,
    softmax,
)
from te_ffi_kernels._te.reference_dequantize import dequantize
from te_ffi_kernels._te.reference_gemm import gemm, gemm_v2
from te_ffi_kernels._te.reference_quantize import dbias_quantize, grouped_quantize
from te_ffi_kernels._weights.reference import (
    gemm_w8a8,
    gemm_w8a16,
    gemv_w4,
    gemv_w8,
    pack_w4,
    pack_w8,
    packed_take,
)

__all__ = [
    "act_lu",
    "activation",
    "dact_lu",
    "dbias_quantize",
    "decode_attention",
    "dequantize",
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
    "layernorm",
    "normalization_bwd",
    "normalization_fwd",
    "pack_w4",
    "pack_w8",
    "packed_take",
    "quantize_dact_dbias",
    "scaled_masked_softmax_bwd",
    "scaled_masked_softmax_fwd",
    "scaled_softmax_bwd",
    "scaled_softmax_fwd",
    "scaled_upper_triang_masked_softmax_bwd",
    "scaled_upper_triang_masked_softmax_fwd",
    "softmax",
]
