"""gemm_v2: a matmul in floats, or in quantized values with scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..op import Op
from ..quantize import numbers
from ..quantize.cotangents import cotangent_of
from ..quantize.modes import ScalingMode
from . import reference
from .config import Attributes, GemmConfig, gemm_config
from .sharding import partition_gemm
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
    """Return ``gelu(alpha * matmul(lhs, rhs) + bias)``; bias and gelu are optional.

    The arguments are those of Transformer Engine's primitive, and `fuse_gelu`. Sums are in
    float32 (of float8 on GPUs, in what their tensor cores have), and the result is rounded once.
    Sums of int8 values are exact. On CPU it is plain JAX, which is as fast as a kernel was for
    floats and faster for int8.

    Args:
        lhs: float32, bfloat16 or float16 without scaling; quantized values otherwise.
        lhs_scale_inv: its scales, which quantized values are multiplied with. Per tensor
            float32[1]; per channel float32 in the shape of the kept axes; with MXFP8
            float8_e8m0fnu or uint8 in lhs's shape, one for 32 numbers along the last contracted
            axis. Empty without scaling.
        rhs: as lhs. float8_e5m2 for both is refused, as on GPUs.
        rhs_scale_inv: as `lhs_scale_inv`.
        bias: of `out_dtype`, in the shape of the axes of rhs that are kept; empty for none.
        alpha: float32[1]. (Transformer Engine uses it with NVFP4 alone.)
        beta: float32[1], zero: the result has no value before. Another gives NaN.
        out_dtype: float32, bfloat16 or float16.
        contracting_dims: axes of lhs and of rhs that are summed over, the first ones or the last
            ones.
        scaling_mode: a ``ScalingMode`` or its number, for both factors.
        use_split_accumulator: for GPUs, whose sums of float8 have fewer digits without it.
        transpose_batch_sequence: not used (collective matmuls).
        sequence_dim: not used (collective matmuls).
        is_outer: not used.
        collective_op: must be 0.
        fuse_gelu: whether the result is passed through gelu, in its form with tanh (ours: the
            primitive doesn't have this argument, its predecessor had).

    Returns:
        An array with the axes of lhs that are kept, and those of rhs.

    Differentiable with respect to floats, float8 values, float32 scales, bias and alpha; the
    matmuls of the gradient are in floats. Int8 values and MXFP8 scales count as constant.

    Raises:
        TypeError: a dtype that the mode doesn't have, or two that don't go together.
        ValueError: shapes that don't go together.
        NotImplementedError: NVFP4, or collective matmuls.
    """
    del transpose_batch_sequence, sequence_dim, is_outer
    operands = (lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, alpha, beta)
    config = gemm_config(
        "gemm_v2", *operands, out_dtype, contracting_dims, scaling_mode, use_split_accumulator,
        collective_op, fuse_gelu=fuse_gelu,
    )  # fmt: skip
    return MATMUL(config, *map(jnp.asarray, operands))


def _attributes(config: GemmConfig, *_: jax.Array) -> dict[str, Any]:
    return {"config": Attributes(config.attributes())}


def _gradient(config: GemmConfig, saved: Any, ct: jax.Array) -> Any:
    lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, alpha, beta = saved
    factor = alpha.reshape(())
    if config.fuse_gelu:
        linear = dataclasses.replace(config, fuse_gelu=False, out_dtype=jnp.dtype(jnp.float32))
        before = MATMUL(linear, *saved[:4], bias.astype(jnp.float32), alpha, beta)
        _, pull = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), before)
        ct = pull(ct.astype(jnp.float32))[0].astype(ct.dtype)
    left, right = config.left, config.right
    floats = config.mode is ScalingMode.NO_SCALING
    dtype = jnp.promote_types(config.out_dtype, lhs.dtype) if floats else config.out_dtype
    left_numbers = numbers_of(config.mode, left, lhs, lhs_scale_inv, dtype)
    right_numbers = numbers_of(config.mode, right, rhs, rhs_scale_inv, dtype)
    # As a factor, ct has the kept axes of lhs and then those of rhs.
    ct = ct.astype(dtype)
    m, n = len(left.kept), len(right.kept)
    by_left = Side(ct.shape, m, True)
    by_right = Side(ct.shape, m, False)
    assert ct.ndim == m + n
    turned_right, turned_left = _other(right), _other(left)
    if left.leading:
        left_grad = _matmul(right_numbers, turned_right, ct, by_right)
    else:
        left_grad = _matmul(ct, by_right, right_numbers, turned_right)
    if right.leading:
        right_grad = _matmul(left_numbers, turned_left, ct, by_left)
    else:
        right_grad = _matmul(ct, by_left, left_numbers, turned_left)
    left_grad, right_grad = left_grad.reshape(lhs.shape), right_grad.reshape(rhs.shape)
    bias_ct = ct.astype(jnp.float32).sum(tuple(range(m))) if bias.size else None
    alpha_ct = (left_grad * left_numbers.astype(jnp.float32)).sum().reshape(alpha.shape)
    return (
        *_of_factor(config.mode, left, lhs, lhs_scale_inv, left_grad * factor),
        *_of_factor(config.mode, right, rhs, rhs_scale_inv, right_grad * factor),
        cotangent_of(bias, bias_ct),
        alpha_ct,
        None,
    )


def _other(side: Side) -> Side:
    """Return the factor with kept and contracted axes exchanged."""
    return Side(side.shape, side.boundary, not side.leading)


def _matmul(lhs: jax.Array, left: Side, rhs: jax.Array, right: Side) -> jax.Array:
    """Return the matmul of floats, in float32."""
    config = GemmConfig(jnp.dtype(jnp.float32), ScalingMode.NO_SCALING, left, right)
    none = jnp.zeros((0,), jnp.float32)
    one = jnp.ones((1,), jnp.float32)
    return MATMUL(config, lhs, none, rhs, none, none, one, 0 * one)


def numbers_of(
    mode: ScalingMode, side: Side, x: jax.Array, scales: jax.Array, dtype: Any
) -> jax.Array:
    """Return the numbers that a factor stands for."""
    if mode is ScalingMode.NO_SCALING:
        return x.astype(dtype)
    wide = numbers.decode(x, scales, mode, side.boundary, by_column=side.leading)
    return wide.astype(dtype)


def _of_factor(
    mode: ScalingMode, side: Side, x: jax.Array, scales: jax.Array, grad: jax.Array
) -> tuple[Any, Any]:
    """Return a factor's and its scales' cotangents from its values' cotangent."""
    if mode is ScalingMode.NO_SCALING:
        return cotangent_of(x, grad), None
    wide = numbers.spread(scales, x.shape, mode, side.boundary, by_column=side.leading)
    if mode.is_mx:
        return cotangent_of(x, numbers.multiply_by_power(grad, wide)), None
    over = tuple(range(x.ndim)) if mode.is_tensor else side.contracted
    scales_ct = (grad * x.astype(jnp.float32)).sum(over).reshape(scales.shape)
    return cotangent_of(x, grad * wide), cotangent_of(scales, scales_ct)


MATMUL = Op(
    "gemm_v2",
    reference.matmul,
    results=lambda config, *_: config.result,
    attributes=_attributes,
    partition=partition_gemm,
    gradient=_gradient,
)
