"""How much memory beside operands and results the kernels take. Imports no JAX.

What a kernel does before and after a library's call is known in C++, which is asked here.
"""

from __future__ import annotations

import math

from interception_core import Aval, KernelCall

from . import _attention, _gemm
from ._gemm import CUBLASLT
from ._status import native

PART = 256
"""Parts of a workspace begin at multiples of this, which its address needn't be."""

FEW_ROWS = 16
"""Up to so many rows, a kernel reads the panels of a packed weight, whatever it is."""

QUANTIZE = ("gemm_w8a8", "gemm_w4a8")
"""The ops that quantize x to int8."""

_FLOATS = ("float32", "bfloat16", "float16")
_FOUR_BITS = ("gemm_w4a16", "gemm_w4a8")


def gemm_v2(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for cuBLASLt, and for what it doesn't do."""
    return PART + native().gemm_workspace(*_gemm.matmul(call, results[0].dtype)) + CUBLASLT


def grouped_gemm_v2(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for cuBLASLt, and for what it doesn't do, if one group has everything."""
    beside = native().gemm_workspace(*_gemm.of_group(call, results[0].dtype))
    return PART + beside + CUBLASLT


def multiplies_with_cublaslt(call: KernelCall) -> bool:
    """Return whether cuBLASLt, and not a kernel here, multiplies."""
    x = call.operands[0]
    if call.param("group_sizes", 0) or math.prod(x.shape[:-1]) <= FEW_ROWS:
        return False
    return call.op in QUANTIZE or x.dtype != "float32"


def packed_matmul(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for quantized values of the rows, and for cuBLASLt and the weight as it takes it."""
    x, group, op = call.operands[0], call.param("group"), call.op
    beside = native().packed_workspace(
        x.shape[0],
        call.param("k"),
        call.param("n"),
        group,
        4 if op in _FOUR_BITS else 8,
        op in QUANTIZE,
        _FLOATS.index(x.dtype),
        _FLOATS.index(results[0].dtype),
        call.operands[3].shape[0] if call.param("group_sizes", 0) else -1,
    )
    if multiplies_with_cublaslt(call):
        return PART + beside + CUBLASLT
    # XLA's arrays have bytes.
    return PART + beside if beside else 1


def dbias_quantize(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for parts of the column sums."""
    shape, axis = call.operands[0].shape, call.param("flatten_axis")
    return _sums(shape[:axis], shape[axis:], call.param("is_dbias"))


def dact_dbias_quantize(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for parts of the column sums."""
    shape = call.operands[1].shape
    return _sums(shape[:-2], shape[-2:], call.param("is_dbias"))


def norm_backward(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for parts of the sums that are the gradients of gamma and beta."""
    shape = call.operands[1].shape
    return _sums(shape[:-1], shape[-1:], 2)


def _sums(rows: tuple[int, ...], columns: tuple[int, ...], kinds: int) -> int:
    # XLA's arrays have bytes.
    return max(1, native().sums_workspace(math.prod(rows), math.prod(columns), int(kinds)))


def attention(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for cuDNN's plan, which is asked, for lengths and for a copy of the log-sum-exp."""
    cudnn, _ = _attention.planned(call.op, call.operands[0].dtype, call.params)
    backward = call.op == _attention.BACKWARD
    return PART + native().attention_workspace(dict(call.params), backward) + cudnn


def grouped_quantize(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for where each group begins, and the last ends."""
    *_, sizes = call.operands
    return native().GROUP_START * (sizes.shape[0] + 1)


def moe_aux_loss(call: KernelCall, results: tuple[Aval, ...]) -> int:
    """Bytes for sums of parts, in float64."""
    probs = call.operands[0]
    return 8 * math.prod(probs.shape[:-2]) * -(-math.prod(probs.shape[-2:]) // native().LOSS_PART)
