"""What the deprecated gemm is in terms of products: its epilogues, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from . import checks, numbers
from .gemm_config import GemmConfig, gemm_config
from .modes import ScalingMode


@dataclasses.dataclass(frozen=True)
class GemmV1Config:
    """Of gemm: a product, and what is done with it."""

    product: GemmConfig
    fuse_bias: bool
    fuse_gelu: bool
    grad: bool
    bias_shape: tuple[int, ...]
    bias_dtype: Any

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """output, bias_grad, pre_gelu_out."""
        out = self.product.result
        return (
            out,
            jax.ShapeDtypeStruct(self.bias_shape if self.grad else (0,), self.bias_dtype),
            out if self.fuse_gelu else jax.ShapeDtypeStruct((0,), out.dtype),
        )


def gemm_v1_config(
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
    fuse_bias: bool,
    fuse_gelu: bool,
    grad: bool,
    use_split_accumulator: bool,
    collective_op: Any,
) -> GemmV1Config:
    """Checks the arguments of gemm.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``te_ffi_kernels.gemm``.
    """
    op = "gemm"
    config = gemm_config(
        op,
        lhs,
        lhs_scale_inv,
        rhs,
        rhs_scale_inv,
        bias,
        alpha,
        beta,
        out_dtype,
        contracting_dims,
        scaling_mode,
        use_split_accumulator,
        collective_op,
        fuse_gelu=False,
        needs_bias=fuse_bias,
    )
    if fuse_gelu and grad:
        checks.shape(op, "gelu_input", gelu_input, config.shape, "that of the result")
        checks.dtype(op, "gelu_input", gelu_input.dtype, (config.out_dtype,))
    return GemmV1Config(config, fuse_bias, fuse_gelu, grad, bias.shape, bias.dtype)


def composed(
    config: GemmV1Config,
    product: Callable[..., jax.Array],
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    gelu_input: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """gemm by way of `product`, which is called as ``product(config, *operands of gemm_v2)``.

    The product is in float32, and results are rounded once.
    """
    inner = config.product
    dtype = inner.out_dtype
    used = jnp.zeros((0,), bias.dtype) if config.grad else bias
    sums = product(inner, lhs, lhs_scale_inv, rhs, rhs_scale_inv, used, alpha, beta)
    _, bias_result, before_result = config.results
    bias_grad = jnp.zeros(bias_result.shape, bias_result.dtype)
    before = jnp.zeros(before_result.shape, before_result.dtype)
    if not config.grad:
        if not config.fuse_gelu:
            return sums.astype(dtype), bias_grad, before
        return jax.nn.gelu(sums, approximate=True).astype(dtype), bias_grad, sums.astype(dtype)
    if config.fuse_gelu:
        x = gelu_input.astype(jnp.float32)
        _, pull = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)
        sums, before = pull(sums)[0], gelu_input
        if config.fuse_bias:
            kept = len(inner.left.kept)
            bias_grad = sums.sum(tuple(range(kept))).astype(bias.dtype)
    elif config.fuse_bias:
        factor = _numbers(inner, rhs, rhs_scale_inv)
        bias_grad = inner.right.matrix(factor).sum(1).reshape(bias.shape).astype(bias.dtype)
    return sums.astype(dtype), bias_grad, before


def _numbers(config: GemmConfig, rhs: jax.Array, scales: jax.Array) -> jax.Array:
    """rhs in float32."""
    if config.mode is ScalingMode.NO_SCALING:
        return rhs.astype(jnp.float32)
    side = config.right
    return numbers.decode(rhs, scales, config.mode, side.boundary, by_column=side.leading)
