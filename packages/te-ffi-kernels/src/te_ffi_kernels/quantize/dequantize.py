"""dequantize: quantized values times their scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import checks
from ..op import Op
from . import arguments, numbers, reference
from .config import DequantizeConfig
from .cotangents import cotangent_of
from .modes import ScalingMode, scale_shape


def dequantize(
    x: jax.Array,
    amax: jax.Array,
    scale: jax.Array,
    scale_inv: jax.Array,
    out_dtype: DTypeLike = jnp.float32,
    scaling_mode: Any = ScalingMode.DELAYED_TENSOR_SCALING,
    is_colwise: bool = False,
    flatten_axis: int = -1,
) -> jax.Array:
    """Multiply quantized values with their scales, in float32.

    The arrays are those of Transformer Engine's target, which takes float8 with one scale for all;
    the other modes are ours.

    Args:
        x: float8_e4m3fn, float8_e5m2, or (not with MXFP8) int8.
        amax: not used.
        scale: not used.
        scale_inv: float32[1]; MXFP8: float8_e8m0fnu or uint8, one for 32 quantized values along the
            last axis, or with `is_colwise` along the axis before `flatten_axis`; per channel:
            float32[x.shape[:flatten_axis]] (of quantized values by column, which are transposed,
            too).
        out_dtype: float32, bfloat16 or float16.
        scaling_mode: a ``ScalingMode`` or its number.
        is_colwise: whether MXFP8 blocks go along rows.
        flatten_axis: the first axis of x that is columns.

    Returns:
        An array of x's shape. Numbers beyond `out_dtype` are infinite; an MXFP8 scale of 255 gives
        NaN. Differentiable with respect to float8 values and float32 scales.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``dbias_quantize``.
    """
    config = _checked(x, scale_inv, out_dtype, scaling_mode, is_colwise, flatten_axis)
    return DEQUANTIZE(config, x, jnp.asarray(amax), jnp.asarray(scale), scale_inv)


def _checked(
    x: jax.Array,
    scale_inv: jax.Array,
    out_dtype: DTypeLike,
    scaling_mode: Any,
    is_colwise: bool,
    flatten_axis: int,
) -> DequantizeConfig:
    op = "dequantize"
    mode = arguments.scaling_mode(op, scaling_mode, quantized=True)
    arguments.code_dtype(op, "x", x.dtype, mode)
    dtype = checks.dtype(op, "out_dtype", out_dtype, checks.FLOATS)
    if mode.is_tensor:
        arguments.scales(op, "scale_inv", scale_inv, mode, (1,))
        return DequantizeConfig(mode, dtype, 0, is_colwise)
    axis = arguments.axis(op, "flatten_axis", flatten_axis, "x", x.shape)
    by_column = is_colwise and mode.is_mx
    if mode.is_mx:
        arguments.blocks(op, "x", x.shape, axis - 1 if by_column else x.ndim - 1)
    wanted = scale_shape(x.shape, mode, axis, by_column=by_column)
    arguments.scales(op, "scale_inv", scale_inv, mode, wanted)
    return DequantizeConfig(mode, dtype, axis, is_colwise)


def _reference(
    config: DequantizeConfig, x: jax.Array, amax: jax.Array, scale: jax.Array, scale_inv: jax.Array
) -> jax.Array:
    return reference.dequantized(config, x, scale_inv)


def _attributes(config: DequantizeConfig, *_: jax.Array) -> dict[str, Any]:
    return {
        "scaling_mode": int(config.mode),
        "is_colwise": config.is_colwise,
        "flatten_axis": config.axis,
    }


def _gradient(config: DequantizeConfig, saved: Any, ct: jax.Array) -> Any:
    mode, axis = config.mode, config.axis
    x, scale_inv = saved
    ct = ct.astype(jnp.float32)
    qvalue_ct = None
    if x.dtype != jnp.int8:
        wide = numbers.spread(scale_inv, x.shape, mode, axis, by_column=config.by_column)
        qvalue_ct = numbers.multiply_by_power(ct, wide) if mode.is_mx else ct * wide
    scale_ct = None
    if not mode.is_mx:
        products = ct * x.astype(jnp.float32)
        over = tuple(range(0 if mode.is_tensor else axis, x.ndim))
        scale_ct = products.sum(over).reshape(scale_inv.shape)
    return cotangent_of(x, qvalue_ct), None, None, cotangent_of(scale_inv, scale_ct)


DEQUANTIZE = Op(
    "dequantize",
    _reference,
    results=lambda config, x, *_: jax.ShapeDtypeStruct(x.shape, config.dtype),
    attributes=_attributes,
    save=lambda config, operands, _: (operands[0], operands[3]),
    gradient=_gradient,
)
