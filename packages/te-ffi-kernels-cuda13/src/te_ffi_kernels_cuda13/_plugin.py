"""What te-ffi-kernels-cuda13 declares: kernels for ops of te-ffi-kernels, by the same names."""

from interception_core import DoctorCheck, KernelSpec, hookimpl

from ._status import built

API = (1, 3)

_SOFTMAX = ("scaled_softmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax")
_MATMULS = ("gemm_w8a8", "gemm_w4a8", "gemm_w8a16", "gemm_w4a16")
_ROUTER = ("fused_topk_with_score_function", "fused_moe_aux_loss")
OPS = (
    "dbias_quantize",
    "dequantize",
    "grouped_quantize",
    "fused_attn_forward",
    "fused_attn_backward",
    "gemm_v2",
    "grouped_gemm_v2",
    *_MATMULS,
    "pack_w8",
    "pack_w4",
    *(f"{op}_{direction}" for op in (*_SOFTMAX, *_ROUTER) for direction in ("forward", "backward")),
    "norm_forward",
    "norm_backward",
    "act_lu",
    "dact_dbias_quantize",
    "make_row_id_map",
    "permute_with_mask_map",
    "unpermute_with_mask_map",
    "unpermute_bwd_with_merging_probs",
    "topk",
)
"""The ops with a kernel on CUDA. The others run as plain JAX there."""


# What of _supports decides about an op, where that isn't `anything`, and of _workspace.
_SIZED = {
    "gemm_v2": "gemm_v2",
    "grouped_gemm_v2": "grouped_gemm_v2",
    "fused_attn_forward": "attention",
    "fused_attn_backward": "attention",
    **dict.fromkeys(_MATMULS, "packed_matmul"),
}
_SUPPORTS = _SIZED | {"topk": "topk", "pack_w8": "packing", "pack_w4": "packing"}
_WORKSPACES = _SIZED | {
    "dbias_quantize": "dbias_quantize",
    "dact_dbias_quantize": "dact_dbias_quantize",
    "norm_backward": "norm_backward",
    "grouped_quantize": "grouped_quantize",
    "fused_moe_aux_loss_forward": "moe_aux_loss",
}


@hookimpl
def jaxtap_register_kernels():
    """Return the kernels, where they were built."""
    if not built():
        return []
    return [
        KernelSpec(
            target=f"te_ffi_kernels.{op}",
            platform="cuda",
            handlers="te_ffi_kernels_cuda13._ffi:registrations",
            op=op,
            supports=f"te_ffi_kernels_cuda13._supports:{_SUPPORTS.get(op, 'anything')}",
            summary="on CUDA 13",
            workspace=(
                f"te_ffi_kernels_cuda13._workspace:{_WORKSPACES[op]}" if op in _WORKSPACES else None
            ),
        )
        for op in OPS
    ]


@hookimpl
def jaxtap_doctor_checks():
    """Return the checks for ``jaxtap doctor``."""
    run = "te_ffi_kernels_cuda13._doctor:cuda"
    return [DoctorCheck("cuda", "whether the CUDA kernels, JAX and the driver fit", run)]
