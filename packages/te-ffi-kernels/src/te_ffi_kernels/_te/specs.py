"""The kernels of this folder, as declared to plugins' hosts. Imports no JAX."""

from interception_core import KernelSpec

_OPS = {
    "dbias_quantize": "quantizes by row, by column or both, and sums columns",
    "dequantize": "codes times their scales",
    "grouped_quantize": "quantizes groups of rows, each with scales of its own",
    "gemm_v2": "product of floats, or of codes with scales; bias, gelu",
    "gemm": "deprecated: gemm_v2 with epilogues for gradients",
}

_WORKSPACES = ("grouped_quantize", "gemm_v2")

SPECS = [
    KernelSpec(
        target=f"te_ffi_kernels.{op}",
        platform="cpu",
        handlers="te_ffi_kernels._ffi:registrations",
        op=op,
        supports="te_ffi_kernels._te.supports:anything",
        summary=summary,
        apply=f"te_ffi_kernels:{op}",
        workspace=f"te_ffi_kernels._te.workspace:of_{op}" if op in _WORKSPACES else None,
    )
    for op, summary in _OPS.items()
]
