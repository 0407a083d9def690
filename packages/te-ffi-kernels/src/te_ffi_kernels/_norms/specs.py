"""The kernels of this folder, as declared to plugins' hosts. Imports no JAX."""

from interception_core import KernelSpec

_OPS = {
    "norm_forward": ("layernorm", "layer norm or RMS norm of rows, as floats or codes"),
    "norm_backward": ("normalization_bwd", "gradient of a layer norm or RMS norm"),
}

SPECS = [
    KernelSpec(
        target=f"te_ffi_kernels.{op}",
        platform="cpu",
        handlers="te_ffi_kernels._ffi:registrations",
        op=op,
        supports="te_ffi_kernels._te.supports:anything",
        summary=summary,
        apply=f"te_ffi_kernels:{name}",
    )
    for op, (name, summary) in _OPS.items()
]
