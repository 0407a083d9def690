"""The kernels of this folder, as declared to plugins' hosts. Imports no JAX."""

from interception_core import KernelSpec

_OPS = {
    "act_lu": ("activation", "activation, plain or gated, as floats or codes"),
    "dact_dbias_quantize": (
        "quantize_dact_dbias",
        "gradient of an activation, as floats or codes, and its sums over rows",
    ),
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
