"""What te-ffi-kernels declares: one list of all kernels. Imports no JAX."""

from interception_core import DoctorCheck, KernelSpec, hookimpl

API = (1, 5)


def _kernel(
    op: str,
    summary: str,
    function: str | None = None,
    *,
    supports: str = "anything",
    workspace: str | None = None,
    bench: str = "_bench_others:calls",
) -> KernelSpec:
    """Return the declaration of a kernel.

    Args:
        op: name of its op, and of its target in this package.
        summary: a few words for lists of kernels.
        function: the public function that calls it; by default the one of the op's name, "" for
            none.
        supports: name of a function in ``_supports``.
        workspace: name of a function in ``_workspace``, or None.
        bench: "module:function" of this package.
    """
    function = op if function is None else function
    return KernelSpec(
        target=f"te_ffi_kernels.{op}",
        platform="cpu",
        handlers="te_ffi_kernels._stages:registrations",
        op=op,
        supports=f"te_ffi_kernels._supports:{supports}",
        summary=summary,
        apply=f"te_ffi_kernels:{function}" if function else None,
        workspace=f"te_ffi_kernels._workspace:{workspace}" if workspace else None,
        bench=f"te_ffi_kernels.{bench}",
    )


def _both(op: str, summary: str, gradient: str) -> list[KernelSpec]:
    """Return the kernels of an op and of its gradient."""
    forward = _kernel(f"{op}_forward", summary, f"{op}_fwd")
    return [forward, _kernel(f"{op}_backward", f"{gradient} {summary}", f"{op}_bwd")]


def _matmul(op: str, summary: str) -> KernelSpec:
    """Return the kernel of a matmul with a packed weight."""
    return _kernel(op, summary, supports="matmul", bench="_bench:matmul")


_KERNELS = [
    _kernel("pack_w8", "packs a weight in 8 bits", supports="packing"),
    _kernel("pack_w4", "packs a weight in 4 bits", supports="packing"),
    _matmul("gemm_w8a8", "int8 weights, activations quantized to int8 by row"),
    _matmul("gemm_w8a16", "int8 weights, float activations"),
    _matmul("gemm_w4a16", "int4 weights, float activations"),
    _matmul("gemm_w4a8", "int4 weights, activations quantized to int8 by row and group"),
    _kernel(
        "conv_w8a8",
        "convolution with int8 weights, activations quantized to int8 by image",
        supports="convolution",
        bench="_bench:convolution",
    ),
    _kernel(
        "conv_w4a8",
        "convolution with int4 weights, activations quantized to int8 by image",
        supports="convolution",
        bench="_bench:convolution",
    ),
    _kernel(
        "conv_w8a16",
        "depthwise convolution with int8 weights, float activations",
        supports="float_convolution",
        bench="_bench:convolution",
    ),
    _kernel(
        "conv_w4a16",
        "depthwise convolution with int4 weights, float activations",
        supports="float_convolution",
        bench="_bench:convolution",
    ),
    _kernel("packed_take", "rows or columns of packed weights, dequantized", supports="taking"),
    _kernel("dbias_quantize", "quantizes by row, by column or both, and sums columns"),
    _kernel("dequantize", "quantized values times their scales"),
    _kernel("fake_quantize", "rounds to the integers of an average range, and adds to it"),
    _kernel(
        "quantize_int8",
        "int8 by row or by column, rounded to nearest or at random",
        supports="quantizing",
    ),
    _kernel(
        "dot_int8",
        "products of int8 in training: of activations, weights and gradients as they lie, rescaled",
        supports="int8_products",
    ),
    _kernel(
        "grouped_quantize",
        "quantizes groups of rows, each with separate scales",
        workspace="of_grouped_quantize",
    ),
    _kernel(
        "grouped_gemm_v2",
        "groups of rows, each times its own matrix; floats, or quantized values with scales",
        workspace="of_grouped_gemm_v2",
    ),
    _kernel("make_row_id_map", "the rows that tokens go to, from a routing map", "token_dispatch"),
    _kernel("permute_with_mask_map", "tokens copied to the rows of experts", "token_dispatch"),
    _kernel("unpermute_with_mask_map", "sums of the rows of tokens", "token_combine"),
    _kernel(
        "unpermute_bwd_with_merging_probs",
        "gradients of weighted sums of the rows of tokens",
        "token_combine",
    ),
    _kernel("topk", "the largest numbers of rows, and where they are", supports="largest"),
    _kernel(
        "fused_attn_forward",
        "attention, block by block, and the log-sum-exp of its scores",
        "fused_attn",
    ),
    _kernel(
        "fused_attn_backward", "gradients of attention, from the log-sum-exp", "fused_attn_bwd"
    ),
    _kernel(
        "decode_attention",
        "attention of a few queries over a cache of keys and values",
        supports="attention",
        bench="_bench:attention",
    ),
    *_both("scaled_softmax", "softmax of scaled logits", "gradient of the"),
    *_both(
        "scaled_masked_softmax",
        "softmax of the scaled logits that a mask leaves",
        "gradient of the",
    ),
    *_both(
        "scaled_upper_triang_masked_softmax",
        "softmax of scaled logits up to the diagonal",
        "gradient of the",
    ),
    *_both(
        "fused_topk_with_score_function",
        "experts of tokens, by score, and their weights",
        "gradient of:",
    ),
    *_both("fused_moe_aux_loss", "the loss that evens experts out", "gradient of:"),
    _kernel(
        "norm_forward", "layer norm or RMS norm of rows, as floats or quantized values", "layernorm"
    ),
    _kernel("norm_backward", "gradient of a layer norm or RMS norm", "normalization_bwd"),
    _kernel("act_lu", "activation, plain or gated, as floats or quantized values", "activation"),
    _kernel(
        "dact_dbias_quantize",
        "gradient of an activation, as floats or quantized values, and its sums over rows",
        "quantize_dact_dbias",
    ),
]


@hookimpl
def jaxtap_register_kernels():
    """Return the kernels."""
    return _KERNELS


@hookimpl
def jaxtap_doctor_checks():
    """Return the checks for ``jaxtap doctor``."""
    return [
        DoctorCheck("isa", "which instruction sets the kernels use", "te_ffi_kernels._doctor:isa")
    ]
