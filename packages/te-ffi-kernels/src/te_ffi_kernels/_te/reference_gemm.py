"""gemm_v2 and gemm in plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from . import numbers
from .gemm_config import GemmConfig, gemm_config
from .gemm_grad import GemmV1Config, composed, gemm_v1_config
from .modes import ScalingMode
from .sides import Side


def gemm_v2(
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    out_dtype: DTypeLike,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    scaling_mode: Any,
    use_split_accumulator: bool = False,
    transpose_batch_sequence: bool = False,
    sequence_dim: int = -1,
    is_outer: bool = True,
    collective_op: Any = 0,
    fuse_gelu: bool = False,
) -> jax.Array:
    """As ``te_ffi_kernels.gemm_v2``; NaN where `beta` isn't 0."""
    del transpose_batch_sequence, sequence_dim, is_outer
    operands = (lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, alpha, beta)
    config = gemm_config(
        "gemm_v2",
        *operands,
        out_dtype,
        contracting_dims,
        scaling_mode,
        use_split_accumulator,
        collective_op,
        fuse_gelu=fuse_gelu,
    )
    return product(config, *operands)


def product(
    config: GemmConfig,
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
) -> jax.Array:
    """The result for checked arguments."""
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
    """[kept, contracted], MX scales multiplied in; float32 but for int8."""
    if mode.is_mx:
        x = numbers.decode(x, scales, mode, side.boundary, by_column=side.leading)
    return side.matrix(x if x.dtype == jnp.int8 else x.astype(jnp.float32))


def gemm(
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    gelu_input: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    out_dtype: DTypeLike,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    scaling_mode: Any,
    fuse_bias: bool = False,
    fuse_gelu: bool = False,
    grad: bool = False,
    use_split_accumulator: bool = False,
    transpose_batch_sequence: bool = False,
    sequence_dim: int = -1,
    is_outer: bool = True,
    collective_op: Any = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``te_ffi_kernels.gemm``, without the warning."""
    del transpose_batch_sequence, sequence_dim, is_outer
    operands = (lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, gelu_input, alpha, beta)
    config = gemm_v1_config(
        *operands,
        out_dtype,
        contracting_dims,
        scaling_mode,
        fuse_bias,
        fuse_gelu,
        grad,
        use_split_accumulator,
        collective_op,
    )
    return product_v1(config, *operands)


def product_v1(
    config: GemmV1Config, *operands: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The results of gemm for checked arguments."""
    return composed(config, _in_float32, *operands)


def _in_float32(config: GemmConfig, *operands: jax.Array) -> jax.Array:
    run: Callable[..., jax.Array] = product
    return run(dataclasses.replace(config, out_dtype=jnp.dtype(jnp.float32)), *operands)
