"""dequantize: codes times their scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _op
from . import numbers, reference_dequantize
from .cotangents import cotangent_of, nothing
from .modes import ScalingMode

_Config = tuple[ScalingMode, Any, int, bool]  # mode, dtype, axis, is_colwise


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
    """Multiplies codes with their scales, in float32.

    The arrays are those of Transformer Engine's target, which takes float8 with one scale for all;
    the other modes are ours.

    Args:
        x: float8_e4m3fn, float8_e5m2, or (not with MXFP8) int8.
        amax: not used.
        scale: not used.
        scale_inv: float32[1]; MXFP8: float8_e8m0fnu or uint8, one for 32 codes along the last
            axis, or with `is_colwise` along the axis before `flatten_axis`; per channel:
            float32[x.shape[:flatten_axis]] (of codes by column, which are transposed, too).
        out_dtype: float32, bfloat16 or float16.
        scaling_mode: a ``ScalingMode`` or its number.
        is_colwise: whether MXFP8 blocks go along rows.
        flatten_axis: the first axis of x that is columns.

    Returns:
        An array of x's shape. Numbers beyond `out_dtype` are infinite; an MXFP8 scale of 255 gives
        NaN. Differentiable with respect to float8 codes and float32 scales.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``dbias_quantize``.
    """
    mode, dtype, axis = reference_dequantize.checked(
        x, scale_inv, out_dtype, scaling_mode, is_colwise, flatten_axis
    )
    config = (mode, dtype, axis, is_colwise)
    return _run(config, x, jnp.asarray(amax), jnp.asarray(scale), scale_inv)


def _kernel(config: _Config, *operands: jax.Array) -> jax.Array:
    mode, dtype, axis, is_colwise = config

    def in_jax(x: jax.Array, amax: jax.Array, scale: jax.Array, scale_inv: jax.Array) -> jax.Array:
        return reference_dequantize.dequantized(mode, dtype, axis, is_colwise, x, scale_inv)

    return _op.call(
        "dequantize",
        in_jax,
        operands,
        jax.ShapeDtypeStruct(operands[0].shape, dtype),
        scaling_mode=int(mode),
        is_colwise=is_colwise,
        flatten_axis=axis,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(config: _Config, *operands: jax.Array) -> jax.Array:
    return _op.batched(functools.partial(_kernel, config))(*operands)


def _forward(config: _Config, *operands: jax.Array) -> Any:
    return _differentiable(config, *operands), operands


def _backward(config: _Config, saved: Any, ct: jax.Array) -> Any:
    mode, _, axis, is_colwise = config
    x, amax, scale, scale_inv = saved
    ct = ct.astype(jnp.float32)
    by_column = is_colwise and mode.is_mx
    codes_ct = None
    if x.dtype != jnp.int8:
        wide = numbers.spread(scale_inv, x.shape, mode, axis, by_column=by_column)
        codes_ct = numbers.multiply_by_power(ct, wide) if mode.is_mx else ct * wide
    scale_ct = None
    if not mode.is_mx:
        products = ct * x.astype(jnp.float32)
        over = tuple(range(0 if mode.is_tensor else axis, x.ndim))
        scale_ct = products.sum(over).reshape(scale_inv.shape)
    return (
        cotangent_of(x, codes_ct),
        nothing(amax),
        nothing(scale),
        cotangent_of(scale_inv, scale_ct),
    )


_differentiable.defvjp(_forward, _backward)
_run = jax.jit(_differentiable, static_argnums=0)
