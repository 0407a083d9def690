"""The softmax ops in plain JAX, in float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config


def forward(config: Config, logits: jax.Array, *mask: jax.Array) -> jax.Array:
    """Return the softmax; masks repeat if there are fewer than batches."""
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
    """Return the gradient of the logits for checked arguments."""
    grad, out = dz.astype(jnp.float32), softmax_out.astype(jnp.float32)
    if config.causal:
        # What is beyond the diagonal may be anything, as for the kernel.
        grad, out = (jnp.where(_lower(dz), x, 0) for x in (grad, out))
    found = (grad - jnp.sum(grad * out, -1, keepdims=True)) * out * np.float32(config.scale)
    return found.astype(dz.dtype)


def _lower(x: jax.Array) -> jax.Array:
    q, k = x.shape[-2:]
    lower = jnp.arange(q)[:, None] >= jnp.arange(k)[None, :]
    return jnp.broadcast_to(lower, x.shape)
