"""The deprecated gemm, with epilogues forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _op
from .gemm_config import GemmConfig
from .gemm_grad import GemmV1Config, composed, gemm_v1_config
from .ops_gemm import run


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
    """Deprecated: ``gemm_v2``, whose arguments these are, with more epilogues.

    - Forward (`grad` False): a bias that isn't empty is added; with `fuse_gelu` the result is
      passed through gelu, and what it was before is a result too.
    - Backward (`grad` True) of gelu, with `fuse_gelu`: the product times the derivative of gelu at
      `gelu_input`; with `fuse_bias`, bias_grad is the sum of that over the axes of lhs.
    - Backward with `fuse_bias` alone: bias_grad is the sum of rhs over its contracted axes, which
      is the gradient of the bias where rhs is that of the output.

    Args:
        lhs: as of ``gemm_v2``, like those that aren't named here.
        lhs_scale_inv: as of ``gemm_v2``.
        rhs: as of ``gemm_v2``.
        rhs_scale_inv: as of ``gemm_v2``.
        bias: as of ``gemm_v2``. With `grad` its shape and dtype alone count.
        gelu_input: with `fuse_gelu` and `grad`: of the result's shape and dtype; else not used.
        alpha: as of ``gemm_v2``.
        beta: as of ``gemm_v2``.
        out_dtype: as of ``gemm_v2``.
        contracting_dims: as of ``gemm_v2``.
        scaling_mode: as of ``gemm_v2``.
        fuse_bias: forward, whether `bias` must be there; backward, whether to compute bias_grad.
        fuse_gelu: see above.
        grad: see above.
        use_split_accumulator: as of ``gemm_v2``.
        transpose_batch_sequence: not used.
        sequence_dim: not used.
        is_outer: not used.
        collective_op: must be 0.

    Returns:
        ``(output, bias_grad, pre_gelu_out)``; bias_grad of bias's shape with `grad`, else empty;
        pre_gelu_out of the result's shape with `fuse_gelu`, else empty.

    Raises:
        TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError: as ``gemm_v2``.
    """
    del transpose_batch_sequence, sequence_dim, is_outer
    warnings.warn(
        "te_ffi_kernels.gemm is deprecated, as it is in Transformer Engine; use gemm_v2",
        DeprecationWarning,
        stacklevel=2,
    )
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
    return _run(config, *map(jnp.asarray, operands))


def _kernel(config: GemmV1Config, *operands: jax.Array) -> tuple[jax.Array, ...]:
    def by_gemm_v2(*operands: jax.Array) -> tuple[jax.Array, ...]:
        # Which has kernels on more platforms than this one.
        return *composed(config, _in_float32, *operands), jnp.zeros((1,), jnp.uint8)

    return _op.call(
        "gemm",
        by_gemm_v2,
        operands,
        (*config.results, jax.ShapeDtypeStruct((1,), jnp.uint8)),
        fuse_bias=config.fuse_bias,
        fuse_gelu=config.fuse_gelu,
        grad=config.grad,
        **config.product.attributes(),
    )[:-1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(config: GemmV1Config, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return _op.batched(functools.partial(_kernel, config))(*operands)


def _forward(config: GemmV1Config, *operands: jax.Array) -> Any:
    return _differentiable(config, *operands), operands


def _backward(config: GemmV1Config, saved: Any, cts: Any) -> Any:
    def by_parts(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return composed(config, _in_float32, *operands)

    return jax.vjp(by_parts, *saved)[1](tuple(cts))


def _in_float32(config: GemmConfig, *operands: jax.Array) -> jax.Array:
    wide = dataclasses.replace(config, out_dtype=jnp.dtype(jnp.float32))
    *first, bias, alpha, beta = operands
    return run(wide, *first, bias.astype(jnp.float32), alpha, beta)


_differentiable.defvjp(_forward, _backward)
_run = jax.jit(_differentiable, static_argnums=0)
