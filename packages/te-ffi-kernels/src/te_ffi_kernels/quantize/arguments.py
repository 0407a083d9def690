"""Argument checks of this folder's ops, which name op and argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..checks import dtype, member
from .modes import BLOCK, QuantizeLayout, ScalingMode, positive_axis

_CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
_NVFP4 = (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)


def scaling_mode(op: str, given: Any, *, quantized: bool) -> ScalingMode:
    """Return the mode of a number or member.

    Args:
        op: name of the op, for errors.
        given: a ScalingMode, or its number.
        quantized: whether NO_SCALING is refused.
    """
    mode = member(op, "scaling_mode", given, ScalingMode, _NVFP4)
    if mode in _NVFP4:
        raise NotImplementedError(
            f"{op}: scaling_mode must not be NVFP4, which is for GPUs of Transformer Engine, got "
            f"{mode.name}. Use ScalingMode.MXFP8_1D_SCALING."
        )
    if quantized and mode is ScalingMode.NO_SCALING:
        raise ValueError(f"{op}: scaling_mode must be one that quantizes, got NO_SCALING")
    return mode


def layout(op: str, given: Any) -> QuantizeLayout:
    """Return the layout of a number or member."""
    return member(op, "q_layout", given, QuantizeLayout)


def code_dtype(op: str, name: str, given: DTypeLike, mode: ScalingMode) -> Any:
    """Return the dtype of quantized values, which with MX can't be int8."""
    return dtype(op, name, given, _CODES[:2] if mode.is_mx else _CODES)


def scales_dtype(op: str, name: str, given: DTypeLike | None, mode: ScalingMode) -> Any:
    """Return the dtype of scales; the mode's where it isn't given."""
    if given is None:
        return mode.scale_dtype
    return dtype(op, name, given, (jnp.float8_e8m0fnu, jnp.uint8) if mode.is_mx else (jnp.float32,))


def number(op: str, name: str, array: jax.Array) -> None:
    """Raise where an array isn't a float32 of size 1."""
    dtype(op, name, array.dtype, (jnp.float32,))
    if array.size != 1:
        raise ValueError(f"{op}: {name} must have shape (1,), got {array.shape}")


def axis(op: str, name: str, given: int, array_name: str, array_shape: tuple[int, ...]) -> int:
    """Return the axis counted from the front, strictly inside the array."""
    found = positive_axis(given, len(array_shape))
    if not 0 < found < len(array_shape):
        raise ValueError(
            f"{op}: {name} must have axes of {array_name} before it and from it on, got {given} "
            f"for shape {array_shape}"
        )
    return found


def blocks(op: str, name: str, array_shape: tuple[int, ...], at: int) -> None:
    """Raise where an axis isn't whole MX blocks."""
    if array_shape[at] % BLOCK:
        raise ValueError(
            f"{op}: axis {at} of {name} must be a multiple of {BLOCK} for MX blocks, got shape "
            f"{array_shape}. Pad it."
        )


def scales(
    op: str,
    name: str,
    array: jax.Array,
    mode: ScalingMode,
    wanted: tuple[int, ...],
) -> None:
    """Raise where scales do not fit their quantized values."""
    scales_dtype(op, name, array.dtype, mode)
    if mode.is_tensor and array.size == 1:
        return
    if array.shape != wanted:
        raise ValueError(
            f"{op}: {name} must have shape {wanted}, as {mode.name} has it, got {array.shape}"
        )


def no_nvfp4_options(op: str, stochastic_rounding: bool, use_rht: bool) -> None:
    """Raise for what Transformer Engine has for NVFP4 alone."""
    for name, given in (("stochastic_rounding", stochastic_rounding), ("use_rht", use_rht)):
        if given:
            raise NotImplementedError(
                f"{op}: {name} must be False, got True. Transformer Engine has it for NVFP4 "
                "alone, on GPUs."
            )


def size(array_shape: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(array_shape)
