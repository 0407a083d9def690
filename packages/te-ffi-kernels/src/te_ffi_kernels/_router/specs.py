"""The kernels of this folder, as declared to plugins' hosts. Imports no JAX."""

from interception_core import KernelSpec

_OPS = {
    "fused_topk_with_score_function": "experts of tokens, by score, and their weights",
    "fused_moe_aux_loss": "the loss that evens experts out",
}

SPECS = [
    KernelSpec(
        target=f"te_ffi_kernels.{op}_{direction}",
        platform="cpu",
        handlers="te_ffi_kernels._ffi:registrations",
        op=f"{op}_{direction}",
        supports="te_ffi_kernels._te.supports:anything",
        summary=summary if direction == "forward" else f"gradient of: {summary}",
        apply=f"te_ffi_kernels:{op}_{short}",
    )
    for op, summary in _OPS.items()
    for direction, short in (("forward", "fwd"), ("backward", "bwd"))
]
