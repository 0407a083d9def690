"""Attention over a cache in plain JAX, with all scores in memory."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .config import Config


def _one_of(stack: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def attend(
    config: Config,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *rest: jax.Array,
) -> jax.Array:
    """Attend with the kernel's operands; return [b, t, k, g, d]."""
    if config.stacked:
        *rest, index = rest  # type: ignore[assignment]
        scales = [_one_of(x, index) for x in rest[: 2 * config.scaled]]
        rest = (*scales, *rest[2 * config.scaled :])
        keys, values = _one_of(keys, index), _one_of(values, index)
    scales, mask = rest[: 2 * config.scaled], rest[2 * config.scaled :]
    if not config.heads_first:
        keys, values, *scales = (x.swapaxes(1, 2) for x in (keys, values, *scales))
    queries, positions = q.shape[1], keys.shape[2]
    # Products of float32: GPUs would multiply them in TF32.
    logits = config.scale * jnp.einsum(
        "btkgd,bksd->bkgts",
        q.astype(jnp.float32),
        keys.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if scales:
        logits = logits * scales[0][:, :, None, None]
    if config.softcap:
        logits = config.softcap * jnp.tanh(logits / config.softcap)
    # [b, t, s]
    query = jnp.arange(queries, dtype=jnp.int32)[None, :, None]
    last = lengths[:, None, None] + (query - queries + 1 if config.causal else 0 * query)
    at = jnp.arange(positions, dtype=jnp.int32)[None, None]
    seen = at < last
    if config.window:
        seen &= at >= last - config.window
    for one in mask:
        seen &= one
    seen = seen[:, None, None]
    most = jnp.max(logits, -1, keepdims=True, where=seen, initial=-math.inf)
    most = jax.lax.stop_gradient(jnp.where(most == -math.inf, 0.0, most))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits, 0.0) - most), 0.0)
    total = weights.sum(-1)
    if scales:
        weights = weights * scales[1][:, :, None, None]
    # Positions that no query sees may hold NaN, which would remain when multiplied by 0.
    floats = jnp.where(seen.any((1, 2, 3))[:, None, :, None], values.astype(jnp.float32), 0.0)
    out = jnp.einsum("bkgts,bksd->btkgd", weights, floats, precision=jax.lax.Precision.HIGHEST)
    total = jnp.transpose(total, (0, 3, 1, 2))[..., None]
    return jnp.where(total == 0, 0.0, out / jnp.where(total == 0, 1.0, total)).astype(q.dtype)
