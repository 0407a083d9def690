"""Which calls the kernels take. Imports no JAX."""

import math

from interception_core import KernelCall

from . import _attention, _cublas, _cudnn, _workspace
from ._status import compute_capability

_FLOATS = ("float32", "bfloat16", "float16")
_MOST_EXACT = (1 << 17) - 64
_MXFP8 = 2
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def anything(call: KernelCall) -> bool | str:
    """Tells that a kernel takes whatever its op lets through, but for symbolic sizes."""
    for operand in call.operands:
        if not all(isinstance(size, int) for size in operand.shape):
            return f"an operand has the symbolic shape {operand}"
    return True


def gemm_v2(call: KernelCall) -> bool | str:
    """Tells whether cuBLASLt has this product on the GPUs of this machine."""
    fits = anything(call)
    if fits is not True:
        return fits
    lhs, _, rhs, *_ = call.operands
    if 0 in lhs.shape or 0 in rhs.shape:
        return "a factor is empty"
    found = compute_capability()
    if found == 0:
        return "there is no NVIDIA GPU here"
    config = call.param("config") or {}
    needed = 0
    if config.get("scaling_mode") == _MXFP8:
        needed = 100
    elif {lhs.dtype, rhs.dtype} & set(_FLOAT8):
        needed = 89
    if found < needed:
        return (
            f"{lhs.dtype} with scaling_mode {config.get('scaling_mode')} needs a GPU of compute "
            f"capability {needed / 10}, and one here has {found / 10}"
        )
    return _cublas.missing() or True


def attention(call: KernelCall) -> bool | str:
    """Tells whether cuDNN has this attention on the GPUs of this machine."""
    fits = anything(call)
    if fits is not True:
        return fits
    found = compute_capability()
    if found == 0:
        return "there is no NVIDIA GPU here"
    given = call.op, call.operands[0].dtype, call.params
    return _attention.unfit(*given, found) or _cudnn.missing() or _attention.refused(*given) or True


def packed_product(call: KernelCall) -> bool | str:
    """Tells whether a product of x[rows, k] with a weight[k, n] has a kernel."""
    fits = anything(call)
    if fits is not True:
        return fits
    x, weight = call.operands
    k, group = weight.shape[0], call.param("group", 0)
    quantizes = call.op == "gemm_w8a8"
    if x.dtype not in _FLOATS:
        return f"x is {x.dtype}"
    if k == 0:
        return "nothing is contracted"
    if group and (group % 8 or k % group):
        return f"groups of {group} rows, and not a multiple of 8 that divides {k}"
    if quantizes and not group and k > _MOST_EXACT:
        return f"{k} products of int8 are summed, and {_MOST_EXACT} at most stay in int32"
    if not _workspace.multiplies_with_cublaslt(call.op, math.prod(x.shape[:-1]), group):
        return True
    if compute_capability() == 0:
        return "there is no NVIDIA GPU here"
    return _cublas.missing() or True
