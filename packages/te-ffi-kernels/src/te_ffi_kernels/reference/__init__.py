"""Every op in plain JAX, with the same signature: what kernels are compared with.

They are also what runs on a platform without a kernel.
"""

from te_ffi_kernels._activations.reference import (
    act_lu,
    activation,
    dact_lu,
    quantize_dact_dbias,
)
from te_ffi_kernels._norms.reference import layernorm, normalization_bwd, normalization_fwd
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
)

__all__ = [
    "act_lu",
    "activation",
    "dact_lu",
    "dbias_quantize",
    "dequantize",
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
    "quantize_dact_dbias",
]
