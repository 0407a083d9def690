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

KINDS = (
    ("bfloat16", "bfloat16", 0, 80),
    ("int8", "int8", 64, 80),
    ("float8_e4m3fn", "float8_e4m3fn", 1, 89),
    ("float8_e5m2", "float8_e4m3fn", 1, 89),
    ("float8_e4m3fn", "float8_e5m2", 1, 89),
    ("float8_e4m3fn", "float8_e4m3fn", 64, 89),
    ("float8_e4m3fn", "float8_e4m3fn", 2, 100),
)
"""Kinds of matmul that models have: dtypes, scaling mode, and the capability that they need."""

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


def of_group(call: KernelCall, out: str, size: int | None = None) -> Matmul:
    """Return the matmul of a group of grouped_gemm_v2.

    Args:
        call: of all groups.
        out: dtype of its result.
        size: what the group has of the axis that is divided; all of it without.
    """
    lhs, _, rhs, _, bias, sizes, *_ = call.operands
    lhs_first, rhs_first = not call.param("lhs_is_trans"), call.param("rhs_is_trans")
    m, k = _lanes(lhs, call.param("lhs_axis_boundary"), lhs_first)
    n, _ = _lanes(rhs, call.param("rhs_axis_boundary"), rhs_first)
    if call.param("ragged") == 0:
        m = m if size is None else size
        n = n // sizes.shape[0] if rhs_first else n
    else:
        k = k if size is None else size
    mode, has_bias = call.param("scaling_mode"), math.prod(bias.shape) > 0
    return m, n, k, mode, lhs.dtype, rhs.dtype, lhs_first, rhs_first, out, has_bias, False


def refused_group(call: KernelCall) -> str | None:
    """Return why cuBLASLt has no algorithm for groups of some sizes; None where it has one."""
    for size in (32, None):
        for out in _FLOATS:
            for device in _gpus.one_of_each():
                why = _refused(device, of_group(call, out, size), True)
                if why:
                    return why
    return None


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


def refused_kind(lhs: str, rhs: str, mode: int) -> str | None:
    """Return why cuBLASLt has no algorithm for a matmul of 512 x 512; None where it has one."""
    for out in _FLOATS:
        for device in _gpus.one_of_each():
            given = 512, 512, 512, mode, lhs, rhs, True, True, out, False, False
            why = _refused(device, given, True)
            if why:
                return why
    return None


@functools.cache
def _refused(device: int, given: Matmul, fast: bool) -> str:
    try:
        return native().refused_gemm(device, CUBLASLT, fast, *given)
    except RuntimeError as error:
        return str(error)
