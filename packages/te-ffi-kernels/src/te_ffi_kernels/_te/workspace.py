"""How much memory beside operands and results a product takes, by platform."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from .._workspace import CUBLASLT, PART, bytes_of, up_to
from .gemm_config import GemmConfig
from .modes import BLOCK, ScalingMode


def of_gemm(platform: str, config: GemmConfig, lhs: Any, rhs: Any, bias: Any) -> int:
    """Bytes of the workspace of gemm_v2, for operands that may be blocks of the config's."""
    if platform != "cuda":
        return 1
    block = config.block(lhs.shape, rhs.shape)
    return PART + beside_cublaslt(block, lhs.dtype, bias.size > 0) + CUBLASLT


def beside_cublaslt(config: GemmConfig, dtype: Any, has_bias: bool) -> int:
    """Bytes that te-ffi-kernels-cuda13 takes for what it does before and after cuBLASLt's product.

    The same as GemmSteps of its csrc/cuda/gemm/steps.cc.
    """
    left, right, mode = config.left, config.right, config.mode
    m, n, k = math.prod(left.kept_shape), math.prod(right.kept_shape), left.k
    codes, exact = mode is not ScalingMode.NO_SCALING, jnp.dtype(dtype) == jnp.int8
    half = config.out_dtype != jnp.float32
    depth, cols = (up_to(k, 16), up_to(n, 16)) if codes else (k, n)
    plain = (
        not exact
        and (codes or not half or jnp.dtype(dtype) == config.out_dtype)
        and cols == n
        and mode is not ScalingMode.CHANNEL_SCALING
        and not config.fuse_gelu
    )
    adds_bias = has_bias and plain and n % 8 == k % 8 == 0 and (not codes or half)
    finishes = not plain or (has_bias and not adds_bias)
    parts = [] if finishes else [8]
    # Factors that aren't as cuBLASLt wants codes: lanes first, in multiples of 16.
    if codes and (left.leading or depth != k):
        parts.append(m * depth)
    if codes and (right.leading or depth != k or cols != n):
        parts.append(cols * depth)
    if mode.is_mx:
        parts += [up_to(lanes, 128) * up_to(k // BLOCK, 4) for lanes in (m, cols)]
    if finishes and (half or cols != n):
        parts.append(4 * m * cols)
    return bytes_of(parts)
