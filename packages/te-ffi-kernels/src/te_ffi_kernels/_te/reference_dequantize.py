"""dequantize in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from . import checks, numbers
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
    """As ``te_ffi_kernels.dequantize``."""
    del amax, scale
    mode, dtype, axis = checked(x, scale_inv, out_dtype, scaling_mode, is_colwise, flatten_axis)
    return dequantized(mode, dtype, axis, is_colwise, x, scale_inv)


def dequantized(
    mode: ScalingMode,
    dtype: Any,
    axis: int,
    is_colwise: bool,
    x: jax.Array,
    scale_inv: jax.Array,
) -> jax.Array:
    """The result for checked arguments."""
    by_column = is_colwise and mode.is_mx
    return numbers.decode(x, scale_inv, mode, axis, by_column=by_column).astype(dtype)


def checked(
    x: jax.Array,
    scale_inv: jax.Array,
    out_dtype: DTypeLike,
    scaling_mode: Any,
    is_colwise: bool,
    flatten_axis: int,
) -> tuple[ScalingMode, Any, int]:
    """Mode, dtype and axis, counted from the front (0 where the mode needs none).

    Raises:
        TypeError, ValueError, NotImplementedError: as ``te_ffi_kernels.dequantize``.
    """
    op = "dequantize"
    mode = checks.scaling_mode(op, scaling_mode, quantized=True)
    checks.code_dtype(op, "x", x.dtype, mode)
    dtype = checks.dtype(op, "out_dtype", out_dtype, checks.FLOATS)
    if mode.is_tensor:
        checks.scales(op, "scale_inv", scale_inv, mode, (1,))
        return mode, dtype, 0
    axis = checks.axis(op, "flatten_axis", flatten_axis, "x", x.shape)
    by_column = is_colwise and mode.is_mx
    if mode.is_mx:
        checks.blocks(op, "x", x.shape, axis - 1 if by_column else x.ndim - 1)
    wanted = scale_shape(x.shape, mode, axis, by_column=by_column)
    checks.scales(op, "scale_inv", scale_inv, mode, wanted)
    return mode, dtype, axis
