"""The axes along which the scales of a contraction's parameter differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .ops import Op

_CONV_3D = {"float": "LiteRT has no integer kernel for convolutions along three axes"}


def channels_of(op: Op, params: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    """Return what finds the channel axes of a contraction's operands.

    An operand with batch axes has one scale for all: LiteRT's batched contractions know no other.

    Args:
        op: the operation.
        params: the primitive's.
        shape: of the first operand.
    """
    if op.target == "primitive:dot_general":
        contracted, batch = params["dimension_numbers"]
        return {"contracted": tuple(map(tuple, contracted)), "batched": bool(batch[0])}
    if op.target == "primitive:conv_general_dilated":
        numbers, groups = params["dimension_numbers"], params["feature_group_count"]
        return {
            "features": (None, numbers.rhs_spec[0]),
            # The converter writes these as DEPTHWISE_CONV_2D, which has other kernels.
            "depthwise": 1 < groups == shape[numbers.lhs_spec[1]],
            "lhs_batch": numbers.lhs_spec[0],
            "out_feature": numbers.out_spec[1],
        } | (_CONV_3D if len(numbers.lhs_spec) > 4 else {})
    if op.target == "primitive:gather":
        numbers = params["dimension_numbers"]
        return {
            "rows": tuple(numbers.start_index_map) == (0,) and not numbers.operand_batching_dims
        }
    if op.target == "primitive:integer_pow":
        return {"square": params["y"] == 2}
    return {}


def channel_axes(params: Mapping[str, Any], side: int, ndim: int) -> tuple[int, ...]:
    """Return the channel axes of a contraction's operand with ``ndim`` axes."""
    if "features" in params:
        axis = params["features"][side]
        return () if axis is None else (axis,)
    if params["batched"]:
        return ()
    return tuple(axis for axis in range(ndim) if axis not in params["contracted"][side])


def matrix_axes(
    params: Mapping[str, Any], side: int, ndim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the contracted axes of a matmul's operand, in LiteRT's order, and the others.

    That order is the one of the other operand's axes, which LiteRT flattens as they are.
    """
    contracted = params["contracted"]
    pairs = sorted(zip(contracted[1 - side], contracted[side], strict=True))
    inner = tuple(axis for _, axis in pairs)
    return inner, tuple(axis for axis in range(ndim) if axis not in inner)


def output_channels(params: Mapping[str, Any], ndims: Sequence[int], side: int) -> tuple[int, ...]:
    """Return the axes of a contraction's output that hold its parameter's channels.

    Args:
        params: what ``channels_of`` returned.
        ndims: the number of axes of both operands.
        side: which of them is the parameter.
    """
    if "features" in params:
        return (params["out_feature"],)
    if params["batched"]:
        return ()
    free = [n - len(c) for n, c in zip(ndims, params["contracted"], strict=True)]
    return tuple(range(free[0], free[0] + free[1])) if side == 1 else tuple(range(free[0]))
