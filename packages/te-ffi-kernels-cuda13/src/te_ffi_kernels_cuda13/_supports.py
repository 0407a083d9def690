"""Which calls the kernels take. Imports no JAX."""

from interception_core import KernelCall

from . import _attention, _cublas, _cudnn, _gemm, _gpus, _limits, _workspace

_FLOATS = ("float32", "bfloat16", "float16")
_MOST_EXACT = (1 << 17) - 64
GROUP_ROWS = 32
"""Rows of a weight that tensor cores take at once: groups are multiples of these."""
_MXFP8 = 2
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_MOST_TOPK = 1024
_NO_PART = {
    "rotation": "rows are rotated by another program, before the kernel, on GPUs",
    "x_scale": "kernels for GPUs measure the scale of each row",
    **dict.fromkeys(
        ("bias", "residual", "clamps"), "XLA joins it with what follows the kernel on GPUs"
    ),
}
"""By parameter, why there is no kernel for it."""
_NO_GPU = "there is no NVIDIA GPU here"


def anything(call: KernelCall) -> bool | str:
    """Tell that a kernel takes whatever its op lets through, but for symbolic sizes.

    On GPUs that are too old nothing has a kernel; without a GPU, programs are lowered for others.
    """
    for operand in call.operands:
        if not all(isinstance(size, int) for size in operand.shape):
            return f"an operand has the symbolic shape {operand}"
    return _gpus.unfit(_gpus.OLDEST) or True


def gemm_v2(call: KernelCall) -> bool | str:
    """Tell whether cuBLASLt has this matmul on the GPUs of this machine."""
    fits = anything(call)
    if fits is not True:
        return fits
    lhs, _, rhs, *_ = call.operands
    if 0 in lhs.shape or 0 in rhs.shape:
        return "a factor is empty"
    mode = (call.param("config") or {}).get("scaling_mode")
    return _multiplies(lhs.dtype, rhs.dtype, mode) or _gemm.refused(call) or True


def grouped_gemm_v2(call: KernelCall) -> bool | str:
    """Tells whether cuBLASLt has the matmuls of groups on the GPUs of this machine."""
    fits = anything(call)
    if fits is not True:
        return fits
    lhs, _, rhs, *_ = call.operands
    if 0 in lhs.shape or 0 in rhs.shape:
        return "a factor is empty"
    mode = call.param("scaling_mode")
    contracted, last = call.param("ragged") == 1, not call.param("lhs_is_trans")
    if mode and contracted and (last or call.param("rhs_is_trans")):
        # Matrices of groups then begin at addresses that cuBLASLt can't read.
        return "quantized values are divided along their last axis"
    return _multiplies(lhs.dtype, rhs.dtype, mode) or _gemm.refused_group(call) or True


def topk(call: KernelCall) -> bool | str:
    """Tells whether the largest numbers of a row fit in a block's memory."""
    if call.param("k_value", 1) > _MOST_TOPK:
        return f"k_value is {call.param('k_value')}, and at most {_MOST_TOPK} have a kernel"
    return anything(call)


def _multiplies(lhs: str, rhs: str, mode: int | None) -> str | None:
    """Returns why the GPUs have no matmul of these dtypes; None if they have."""
    if not _gpus.used():
        return _NO_GPU
    needed = _gpus.OLDEST
    if mode == _MXFP8:
        needed = 100
    elif {lhs, rhs} & set(_FLOAT8):
        needed = 89
    what = f"matmuls of {lhs} with scaling_mode {mode}"
    return _gpus.unfit(needed, what) or _cublas.missing()


def attention(call: KernelCall) -> bool | str:
    """Tell whether cuDNN has this attention on the GPUs of this machine.

    A plan asks before there are attributes: what the operands tell, so that cuDNN is asked when the
    program is traced.
    """
    fits = anything(call)
    if fits is not True:
        return fits
    if not call.params:
        q, _, v, *_ = call.operands
        why = _attention.unfit_operands(q.dtype, (q.shape[-1], v.shape[-1]))
        return why or _cudnn.missing() or True if _gpus.used() else _NO_GPU
    capabilities = sorted(set(_gpus.used().values()))
    if not capabilities:
        return _NO_GPU
    given = call.op, call.operands[0].dtype, call.params
    for capability in capabilities:
        why = _attention.unfit(*given, capability)
        if why:
            return why
    return _cudnn.missing() or _attention.refused(*given) or True


def packing(call: KernelCall) -> bool | str:
    """Tell whether quantized values have a packed form here."""
    return _table(call) or anything(call)


def _table(call: KernelCall) -> str | None:
    """Return why a packed weight can't be read; None where it can."""
    table = call.param("table", "int4")
    return None if table == "int4" else f"kernels for GPUs have no table of {table}"


def packed_matmul(call: KernelCall) -> bool | str:
    """Tell whether a matmul of x[rows, k] with a weight[k, n] has a kernel.

    With ``to_pack`` a plan asks, which would pack the weight for it: whether that is worth it.
    """
    fits = packing(call)
    if fits is not True:
        return fits
    x, weight = call.operands
    k, group = weight.shape[0], call.param("group", 0)
    if x.dtype not in _FLOATS:
        return f"x is {x.dtype}"
    if k == 0:
        return "nothing is contracted"
    for part, why in _NO_PART.items():
        if call.param(part, 0):
            return f"{part}: {why}"
    if group and (group % GROUP_ROWS or k % group):
        return f"groups of {group} rows, and not a multiple of {GROUP_ROWS} that divides {k}"
    if call.op in _workspace.QUANTIZE and not group and k > _MOST_EXACT:
        return f"{k} products of int8 are summed, and {_MOST_EXACT} at most stay in int32"
    if call.param("to_pack", False):
        why = _limits.unworthy(call)
        if why:
            return why
    if not _workspace.multiplies_with_cublaslt(call):
        return True
    return _cublas.missing() or True if _gpus.used() else _NO_GPU
