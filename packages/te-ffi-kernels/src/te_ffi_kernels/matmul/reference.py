"""gemm_v2 in plain JAX."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from ..quantize import numbers
from ..quantize.modes import ScalingMode
from ..training.dot import dot_int8
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
    sums = _sums(config, left, right)
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


def _sums(config: GemmConfig, left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the matmul of two matrices, exact for int8."""
    by_left, by_right = (0 if side.leading else 1 for side in (config.left, config.right))
    if left.dtype != jnp.int8:
        dims = ((by_left,), (by_right,)), ((), ())
        return lax.dot_general(left, right, dims, precision=lax.Precision.HIGHEST)
    if by_left == by_right == 0:
        one = jnp.ones((), jnp.float32)
        scales = (jnp.broadcast_to(one, x.shape[1]) for x in (left, right))
        return dot_int8(left, right, *scales)
    # XLA's CPU backend is 5 times as slow where the left side of int8 doesn't end with what is
    # summed.
    if by_left == 0:
        return _whole(right, left, (by_right, by_left)).T
    return _whole(left, right, (by_left, by_right))


def _whole(left: jax.Array, right: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Return sums of int8, of one axis each, as float32."""
    dims = ((contracted[:1], contracted[1:]), ((), ()))
    sums = lax.dot_general(left, right, dims, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32)


def _factor(side: Side, mode: ScalingMode, x: jax.Array, scales: jax.Array) -> jax.Array:
    """Return a matrix of two axes, MX scales multiplied in; float32 but for int8."""
    if mode.is_mx:
        x = numbers.decode(x, scales, mode, side.boundary, by_column=side.leading)
    kept = math.prod(side.kept_shape)
    matrix = x.reshape((side.k, kept) if side.leading else (kept, side.k))
    return matrix if x.dtype == jnp.int8 else matrix.astype(jnp.float32)
