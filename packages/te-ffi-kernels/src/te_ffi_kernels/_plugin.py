"""What te-ffi-kernels declares."""

from interception_core import DoctorCheck, KernelSpec, hookimpl

from ._activations.specs import SPECS as ACTIVATIONS
from ._attention.specs import SPECS as ATTENTION
from ._decode.specs import SPECS as DECODE
from ._norms.specs import SPECS as NORMS
from ._router.specs import SPECS as ROUTER
from ._softmax.specs import SPECS as SOFTMAX
from ._te.specs import SPECS as TE

API = (1, 3)

_WEIGHTS = {
    "pack_w8": "packs a weight in 8 bits",
    "pack_w4": "packs a weight in 4 bits",
    "gemm_w8a8": "int8 weights, activations quantized to int8 by row",
    "gemm_w8a16": "int8 weights, float activations",
    "gemv_w8": "int8 weights, float activations of a few rows",
    "gemv_w4": "int4 weights, float activations",
    "packed_take": "rows or columns of packed weights, dequantized",
}

_SUPPORTS = {"pack_w8": "packing", "pack_w4": "packing", "packed_take": "taking"}
_PRODUCTS = ("gemm_w8a8", "gemm_w8a16", "gemv_w8", "gemv_w4")
_STACKS = {
    "stack": "one weight of a stack",
    "groups": "each group of rows with its weight of a stack",
}


@hookimpl
def jaxtap_register_kernels():
    """Returns the kernels."""
    weights = [
        _spec(op, summary, _SUPPORTS.get(op, "product"), apply=f"te_ffi_kernels:{op}")
        for op, summary in _WEIGHTS.items()
    ]
    # What these ops call with an index or with sizes of groups, so without an apply.
    stacks = [
        _spec(f"{op}_{kind}", f"{_WEIGHTS[op]}; {summary}", "product_of_stack")
        for op in _PRODUCTS
        for kind, summary in _STACKS.items()
    ]
    return [*weights, *stacks, *TE, *ATTENTION, *DECODE, *SOFTMAX, *ROUTER, *NORMS, *ACTIVATIONS]


def _spec(op: str, summary: str, supports: str, apply: str | None = None) -> KernelSpec:
    return KernelSpec(
        target=f"te_ffi_kernels.{op}",
        platform="cpu",
        handlers="te_ffi_kernels._ffi:registrations",
        op=op,
        supports=f"te_ffi_kernels._supports:{supports}",
        summary=summary,
        apply=apply,
    )


@hookimpl
def jaxtap_doctor_checks():
    """Returns the checks for ``jaxtap doctor``."""
    return [
        DoctorCheck("isa", "which instruction sets the kernels use", "te_ffi_kernels._doctor:isa")
    ]
