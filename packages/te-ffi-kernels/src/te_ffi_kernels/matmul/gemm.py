"""The deprecated gemm: gemm_v2, with epilogues forward and backward in plain JAX."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import checks
from .config import GemmConfig, gemm_config
from .op import MATMUL, numbers_of


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
    """Call ``gemm_v2``, whose arguments these are, with more epilogues. Deprecated.

    - Forward (`grad` False): a bias that isn't empty is added; with `fuse_gelu` the result is
      passed through gelu, and what it was before is a result too.
    - Backward (`grad` True) of gelu, with `fuse_gelu`: the matmul times the derivative of gelu at
      `gelu_input`; with `fuse_bias`, bias_grad is the sum of that over the axes of lhs.
    - Backward with `fuse_bias` alone: bias_grad is the sum of rhs over its contracted axes, which
      is the gradient of the bias where rhs is that of the output.

    Args:
        bias: as of ``gemm_v2``. With `grad` its shape and dtype alone count.
        gelu_input: with `fuse_gelu` and `grad`: of the result's shape and dtype; else not used.
        fuse_bias: forward, whether `bias` must be there; backward, whether to compute bias_grad.
        fuse_gelu: see above.
        grad: see above.

    The other arguments are those of ``gemm_v2``.

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
    op = "gemm"
    factors = (lhs, lhs_scale_inv, rhs, rhs_scale_inv)
    config = gemm_config(
        op, *factors, bias, alpha, beta, out_dtype, contracting_dims, scaling_mode,
        use_split_accumulator, collective_op, fuse_gelu=False, needs_bias=fuse_bias,
    )  # fmt: skip
    if fuse_gelu and grad:
        checks.shape(op, "gelu_input", gelu_input, config.shape, "that of the result")
        checks.dtype(op, "gelu_input", gelu_input.dtype, (config.out_dtype,))
    epilogue = _Epilogue(fuse_bias, fuse_gelu, grad)
    return _gemm(config, epilogue, *factors, bias, gelu_input, alpha, beta)


@dataclasses.dataclass(frozen=True)
class _Epilogue:
    """What ``gemm`` does with a matmul; see its arguments."""

    fuse_bias: bool
    fuse_gelu: bool
    grad: bool


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gemm(
    config: GemmConfig,
    of: _Epilogue,
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    gelu_input: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the matmul in float32, and results that are rounded once."""
    dtype = config.out_dtype
    wide = dataclasses.replace(config, out_dtype=jnp.dtype(jnp.float32))
    used = jnp.zeros((0,), jnp.float32) if of.grad else bias.astype(jnp.float32)
    sums = MATMUL(wide, lhs, lhs_scale_inv, rhs, rhs_scale_inv, used, alpha, beta)
    bias_grad = jnp.zeros(bias.shape if of.grad else (0,), bias.dtype)
    before = jnp.zeros(config.shape if of.fuse_gelu else (0,), dtype)
    if not of.grad:
        if not of.fuse_gelu:
            return sums.astype(dtype), bias_grad, before
        return jax.nn.gelu(sums, approximate=True).astype(dtype), bias_grad, sums.astype(dtype)
    if of.fuse_gelu:
        x = gelu_input.astype(jnp.float32)
        _, pull = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)
        sums, before = pull(sums)[0], gelu_input
        if of.fuse_bias:
            kept = len(config.left.kept)
            bias_grad = sums.sum(tuple(range(kept))).astype(bias.dtype)
    elif of.fuse_bias:
        factor = numbers_of(config.mode, config.right, rhs, rhs_scale_inv, jnp.float32)
        bias_grad = config.right.matrix(factor).sum(1).reshape(bias.shape).astype(bias.dtype)
    return sums.astype(dtype), bias_grad, before
