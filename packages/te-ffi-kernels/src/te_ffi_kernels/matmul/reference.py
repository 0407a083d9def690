"""gemm_v2 in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..quantize import numbers
from ..quantize.modes import ScalingMode
from .config import GemmConfig
from .sides import Side


def matmul(
    config: GemmConfig,
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
) -> jax.Array:
    """Return the result for checked arguments; NaN where `beta` isn't 0."""
    mode = config.mode
    left = _factor(config.left, mode, lhs, lhs_scale_inv)
    right = _factor(config.right, mode, rhs, rhs_scale_inv)
    sums = lax.dot_general(
        left,
        right,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.int32 if left.dtype == jnp.int8 else jnp.float32,
    ).astype(jnp.float32)
    if mode.is_tensor:
        sums = sums * (lhs_scale_inv.reshape(()) * rhs_scale_inv.reshape(()))
    elif mode is ScalingMode.CHANNEL_SCALING:
        sums = sums * lhs_scale_inv.reshape(-1, 1) * rhs_scale_inv.reshape(1, -1)
    out = sums * alpha.reshape(())
    if bias.size > 0:
        out = out + bias.astype(jnp.float32).reshape(1, -1)
    if config.fuse_gelu:
        out = jax.nn.gelu(out, approximate=True)
    out = jnp.where(beta.reshape(()) == 0, out, jnp.nan)
    return out.astype(config.out_dtype).reshape(config.shape)


def _factor(side: Side, mode: ScalingMode, x: jax.Array, scales: jax.Array) -> jax.Array:
    """Return [kept, contracted], MX scales multiplied in; float32 but for int8."""
    if mode.is_mx:
        x = numbers.decode(x, scales, mode, side.boundary, by_column=side.leading)
    return side.matrix(x if x.dtype == jnp.int8 else x.astype(jnp.float32))
