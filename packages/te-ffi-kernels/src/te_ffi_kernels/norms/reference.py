"""The norms in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .config import NormConfig


def forward(
    config: NormConfig,
    x: jax.Array,
    scale: jax.Array,
    amax: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return the results for checked arguments."""
    assert config.outputs is not None
    wide = x.astype(jnp.float32)
    factor = gamma.astype(jnp.float32)
    factor = factor + 1 if config.zero_centered_gamma else factor
    mean = wide.mean(-1, keepdims=True)
    rest = wide - mean if config.is_layer else wide
    rsigma = lax.rsqrt((rest * rest).mean(-1, keepdims=True) + jnp.float32(config.epsilon))
    found = rest * rsigma * _row(factor, x)
    if config.is_layer:
        found = found + _row(beta.astype(jnp.float32), x)
    mu = mean.squeeze(-1) if config.is_layer else jnp.zeros((1,), jnp.float32)
    return (*config.outputs.in_jax(found, scale, amax), mu, rsigma.squeeze(-1))


def backward(
    config: NormConfig,
    dz: jax.Array,
    x: jax.Array,
    mu: jax.Array,
    rsigma: jax.Array,
    gamma: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the results for checked arguments."""
    wide, factor = x.astype(jnp.float32), gamma.astype(jnp.float32)
    factor = factor + 1 if config.zero_centered_gamma else factor
    dz = dz.astype(jnp.float32)
    normal = (wide - mu[..., None] if config.is_layer else wide) * rsigma[..., None]
    slope = dz * _row(factor, x)
    rest = slope - normal * (slope * normal).mean(-1, keepdims=True)
    if config.is_layer:
        rest = rest - slope.mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    dgamma = (dz * normal).sum(rows).astype(gamma.dtype)
    dbeta = dz.sum(rows) if config.is_layer else jnp.zeros((1,), jnp.float32)
    dx = (rest * rsigma[..., None]).astype(x.dtype)
    return dx, dgamma, dbeta.astype(gamma.dtype)


def _row(weights: jax.Array, x: jax.Array) -> jax.Array:
    return weights.reshape((1,) * (x.ndim - 1) + weights.shape)
