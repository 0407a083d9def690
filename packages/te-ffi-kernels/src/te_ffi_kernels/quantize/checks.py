"""What the ops of this folder refuse, with errors that name the op and the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .modes import BLOCK, QuantizeLayout, ScalingMode, positive_axis

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
_NVFP4 = (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)


def scaling_mode(op: str, given: Any, *, quantized: bool) -> ScalingMode:
    """Return the mode of a number or member.

    Args:
        op: for errors.
        given: a ScalingMode, or its number.
        quantized: whether no scaling is refused.
    """
    try:
        mode = ScalingMode(getattr(given, "value", given))
    except ValueError:
        raise ValueError(
            f"{op}: scaling_mode is {given!r}, and must be one of: "
            f"{', '.join(m.name for m in ScalingMode if m not in _NVFP4)}"
        ) from None
    if mode in _NVFP4:
        raise NotImplementedError(
            f"{op}: scaling_mode is {mode.name}; NVFP4 is for GPUs of Transformer Engine alone. "
            "Use ScalingMode.MXFP8_1D_SCALING"
        )
    if quantized and mode is ScalingMode.NO_SCALING:
        raise ValueError(
            f"{op}: scaling_mode is NO_SCALING, with which there is nothing to quantize"
        )
    return mode


def layout(op: str, given: Any) -> QuantizeLayout:
    """Return the layout of a number or member."""
    try:
        return QuantizeLayout(getattr(given, "value", given))
    except ValueError:
        raise ValueError(
            f"{op}: q_layout is {given!r}, and must be one of: "
            f"{', '.join(member.name for member in QuantizeLayout)}"
        ) from None


def dtype(op: str, name: str, given: DTypeLike, allowed: Sequence[Any]) -> Any:
    """Return the dtype, which must be one of `allowed`."""
    found = jnp.dtype(given)
    if found not in allowed:
        raise TypeError(
            f"{op}: {name} is {found.name}, and must be "
            f"{' or '.join(jnp.dtype(one).name for one in allowed)}"
        )
    return found


def code_dtype(op: str, name: str, given: DTypeLike, mode: ScalingMode) -> Any:
    """Return the dtype of codes, which with MX can't be int8."""
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
        raise ValueError(f"{op}: {name} has shape {array.shape}, and must be one number: (1,)")


def shape(op: str, name: str, array: jax.Array, wanted: tuple[int, ...], why: str) -> None:
    """Raise where an array has another shape."""
    if array.shape != wanted:
        raise ValueError(f"{op}: {name} has shape {array.shape}, and must have {wanted}: {why}")


def axis(op: str, name: str, given: int, array_name: str, array_shape: tuple[int, ...]) -> int:
    """Return the axis counted from the front, with axes on both of its sides."""
    found = positive_axis(given, len(array_shape))
    if not 0 < found < len(array_shape):
        raise ValueError(
            f"{op}: {name} is {given}, and {array_name} has shape {array_shape}; there must be "
            "axes before it and from it on"
        )
    return found


def blocks(op: str, name: str, array_shape: tuple[int, ...], at: int) -> None:
    """Raise where an axis isn't whole MX blocks."""
    if array_shape[at] % BLOCK:
        raise ValueError(
            f"{op}: {name} has shape {array_shape}, and its axis {at} must be a multiple of "
            f"{BLOCK} for MX blocks: pad it"
        )


def scales(
    op: str,
    name: str,
    array: jax.Array,
    mode: ScalingMode,
    wanted: tuple[int, ...],
) -> None:
    """Raise where scales have another dtype or number than their codes need."""
    scales_dtype(op, name, array.dtype, mode)
    if mode.is_tensor and array.size == 1:
        return
    if array.shape != wanted:
        raise ValueError(
            f"{op}: {name} has shape {array.shape}, and must have {wanted}, as {mode.name} has it"
        )


def no_nvfp4_options(op: str, stochastic_rounding: bool, use_rht: bool) -> None:
    """Raise for what Transformer Engine has for NVFP4 alone."""
    for name, given in (("stochastic_rounding", stochastic_rounding), ("use_rht", use_rht)):
        if given:
            raise NotImplementedError(
                f"{op}: {name} is set, which Transformer Engine has for NVFP4 alone, on GPUs; "
                "leave it unset"
            )


def size(array_shape: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(array_shape)
