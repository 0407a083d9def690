"""The softmax ops in plain JAX, in float32."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import checks
from .checks import Config, SoftmaxFusionType

_SCALED = SoftmaxFusionType.SCALED
_MASKED = SoftmaxFusionType.SCALED_MASKED
_CAUSAL = SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED


def softmax(
    logits: jax.Array,
    mask: jax.Array | None = None,
    scale_factor: float = 1.0,
    softmax_fusion_type: SoftmaxFusionType = _SCALED,
) -> jax.Array:
    """As ``te_ffi_kernels.softmax``."""
    config = checks.config("softmax", softmax_fusion_type, scale_factor)
    masked = config.fusion is _MASKED
    checks.logits("softmax", "logits", logits, 3 if masked else 2)
    if not masked:
        return forward(config, logits)
    return forward(config, logits, checks.mask("softmax", mask, logits))


def scaled_softmax_fwd(logits: jax.Array, scale_factor: float) -> jax.Array:
    """As ``te_ffi_kernels.scaled_softmax_fwd``."""
    return _forward("scaled_softmax_fwd", _SCALED, scale_factor, logits)


def scaled_masked_softmax_fwd(logits: jax.Array, mask: jax.Array, scale_factor: float) -> jax.Array:
    """As ``te_ffi_kernels.scaled_masked_softmax_fwd``."""
    return _forward("scaled_masked_softmax_fwd", _MASKED, scale_factor, logits, mask)


def scaled_upper_triang_masked_softmax_fwd(logits: jax.Array, scale_factor: float) -> jax.Array:
    """As ``te_ffi_kernels.scaled_upper_triang_masked_softmax_fwd``."""
    return _forward("scaled_upper_triang_masked_softmax_fwd", _CAUSAL, scale_factor, logits)


def scaled_softmax_bwd(
    dz: jax.Array, softmax_out: jax.Array, logits: Any, scale_factor: float
) -> jax.Array:
    """As ``te_ffi_kernels.scaled_softmax_bwd``."""
    del logits
    return _backward("scaled_softmax_bwd", _SCALED, scale_factor, dz, softmax_out)


def scaled_masked_softmax_bwd(
    dz: jax.Array, softmax_out: jax.Array, logits: Any, mask: Any, scale_factor: float
) -> jax.Array:
    """As ``te_ffi_kernels.scaled_masked_softmax_bwd``."""
    del logits, mask
    return _backward("scaled_masked_softmax_bwd", _MASKED, scale_factor, dz, softmax_out)


def scaled_upper_triang_masked_softmax_bwd(
    dz: jax.Array, softmax_out: jax.Array, logits: Any, scale_factor: float
) -> jax.Array:
    """As ``te_ffi_kernels.scaled_upper_triang_masked_softmax_bwd``."""
    del logits
    return _backward(
        "scaled_upper_triang_masked_softmax_bwd", _CAUSAL, scale_factor, dz, softmax_out
    )


def _forward(op: str, fusion: SoftmaxFusionType, scale: float, *operands: jax.Array) -> jax.Array:
    config = checks.config(op, fusion, scale)
    checks.logits(op, "logits", operands[0], 3 if fusion is _MASKED else 2)
    if fusion is _MASKED:
        checks.mask(op, operands[1], operands[0])
    return forward(config, *operands)


def _backward(
    op: str, fusion: SoftmaxFusionType, scale: float, dz: jax.Array, softmax_out: jax.Array
) -> jax.Array:
    config = checks.config(op, fusion, scale)
    checks.gradient(op, dz, softmax_out)
    return backward(config, dz, softmax_out)


def forward(config: Config, logits: jax.Array, *mask: jax.Array) -> jax.Array:
    """The softmax of checked arguments. Batches are b * n where masks are n: masks repeat."""
    scaled = logits.astype(jnp.float32) * np.float32(config.scale)
    if mask:
        (given,) = mask
        masks, batch = math.prod(given.shape[:-3]), math.prod(logits.shape[:-3])
        if not masks or not batch:
            return jnp.zeros_like(logits)
        shape = (batch // masks, masks, *logits.shape[-3:])
        where = given.astype(jnp.uint8).reshape(1, masks, 1, *given.shape[-2:]) != 1
        out = jax.nn.softmax(scaled.reshape(shape), where=jnp.broadcast_to(where, shape))
        return out.reshape(logits.shape).astype(logits.dtype)
    if config.causal:
        return jax.nn.softmax(scaled, where=_lower(logits)).astype(logits.dtype)
    return jax.nn.softmax(scaled).astype(logits.dtype)


def backward(config: Config, dz: jax.Array, softmax_out: jax.Array) -> jax.Array:
    """The gradient of the logits for checked arguments."""
    grad, out = dz.astype(jnp.float32), softmax_out.astype(jnp.float32)
    if config.causal:
        # What is beyond the diagonal isn't looked at.
        grad, out = (jnp.where(_lower(dz), x, 0) for x in (grad, out))
    found = (grad - jnp.sum(grad * out, -1, keepdims=True)) * out * np.float32(config.scale)
    return found.astype(dz.dtype)


def _lower(x: jax.Array) -> jax.Array:
    q, k = x.shape[-2:]
    lower = jnp.arange(q)[:, None] >= jnp.arange(k)[None, :]
    return jnp.broadcast_to(lower, x.shape)
