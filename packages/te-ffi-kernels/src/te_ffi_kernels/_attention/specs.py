"""The kernels of this folder, as declared to plugins' hosts. Imports no JAX."""

from interception_core import KernelSpec

_OPS = {
    "forward": ("fused_attn", "attention, block by block, and the log-sum-exp of its scores"),
    "backward": ("fused_attn_bwd", "gradients of attention, from the log-sum-exp"),
}

SPECS = [
    KernelSpec(
        target=f"te_ffi_kernels.fused_attn_{op}",
        platform="cpu",
        handlers="te_ffi_kernels._ffi:registrations",
        op=f"fused_attn_{op}",
        supports="te_ffi_kernels._te.supports:anything",
        summary=summary,
        apply=f"te_ffi_kernels:{name}",
    )
    for op, (name, summary) in _OPS.items()
]
