"""The kernel of this folder, as declared to plugins' hosts. Imports no JAX."""

from interception_core import KernelSpec

SPECS = [
    KernelSpec(
        target="te_ffi_kernels.decode_attention",
        platform="cpu",
        handlers="te_ffi_kernels._ffi:registrations",
        op="decode_attention",
        supports="te_ffi_kernels._te.supports:anything",
        summary="attention of a few queries over a cache of keys and values",
        apply="te_ffi_kernels:decode_attention",
    )
]
