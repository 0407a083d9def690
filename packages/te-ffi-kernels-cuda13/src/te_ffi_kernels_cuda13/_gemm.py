"""What gemm_v2 asks cuBLASLt for."""

from __future__ import annotations

import functools
import math

from interception_core import Aval, KernelCall

from . import _gpus
from ._status import native

CUBLASLT = 32 << 20
"""Bytes that cuBLASLt may use: as much as it's said to make use of on newer GPUs."""

_FLOATS = ("float32", "bfloat16", "float16")

Matmul = tuple[int | str | bool, ...]
"""What the compiled part knows a matmul by."""


def matmul(call: KernelCall, out: str) -> Matmul:
    """Return the matmul of a call whose result is of dtype `out`."""
    lhs, _, rhs, _, bias, *_ = call.operands
    config = call.param("config")
    lhs_first, rhs_first = not config["lhs_transposed"], config["rhs_transposed"]
    m, k = _lanes(lhs, config["lhs_axis_boundary"], lhs_first)
    n, _ = _lanes(rhs, config["rhs_axis_boundary"], rhs_first)
    return (
        m,
        n,
        k,
        config["scaling_mode"],
        lhs.dtype,
        rhs.dtype,
        lhs_first,
        rhs_first,
        out,
        math.prod(bias.shape) > 0,
        config.get("fuse_gelu", False),
    )


def _lanes(factor: Aval, axis: int, first: bool) -> tuple[int, int]:
    """(rows or columns of the result, what is contracted)."""
    sides = math.prod(factor.shape[:axis]), math.prod(factor.shape[axis:])
    return sides if first else sides[::-1]


def refused(call: KernelCall) -> str | None:
    """Return why cuBLASLt has no algorithm for a call on a GPU here; None where it has one.

    A call doesn't say the dtype of its result, so that cuBLASLt is asked about each.
    """
    fast = not call.param("config").get("use_split_accumulator", False)
    for out in _FLOATS:
        for device in _gpus.one_of_each():
            why = _refused(device, matmul(call, out), fast)
            if why:
                return why
    return None


@functools.cache
def _refused(device: int, given: Matmul, fast: bool) -> str:
    try:
        return native().refused_gemm(device, CUBLASLT, fast, *given)
    except RuntimeError as error:
        return str(error)
