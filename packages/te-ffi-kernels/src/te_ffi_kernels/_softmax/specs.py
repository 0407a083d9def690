"""The kernels of this folder, as declared to plugins' hosts. Imports no JAX."""

from interception_core import KernelSpec

_OPS = {
    "scaled_softmax": "softmax of scaled logits",
    "scaled_masked_softmax": "softmax of the scaled logits that a mask leaves",
    "scaled_upper_triang_masked_softmax": "softmax of scaled logits up to the diagonal",
}

SPECS = [
    KernelSpec(
        target=f"te_ffi_kernels.{op}_{direction}",
        platform="cpu",
        handlers="te_ffi_kernels._ffi:registrations",
        op=f"{op}_{direction}",
        supports="te_ffi_kernels._te.supports:anything",
        summary=summary if direction == "forward" else f"gradient of the {summary}",
        apply=f"te_ffi_kernels:{op}_{short}",
    )
    for op, summary in _OPS.items()
    for direction, short in (("forward", "fwd"), ("backward", "bwd"))
]
