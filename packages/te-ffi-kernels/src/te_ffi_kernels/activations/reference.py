"""The activations in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .config import ActivationConfig, ClampedSwigluParams


def forward(
    config: ActivationConfig, x: jax.Array, scale: jax.Array, amax: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the results for checked arguments."""
    wide = x.astype(jnp.float32)
    found, _ = _point(config, wide[..., 0, :])
    if config.is_gated:
        found = found * _gate(config, wide[..., 1, :])[0]
    return config.outputs.in_jax(found, scale, amax)


def backward(
    config: ActivationConfig, dz: jax.Array, x: jax.Array, scale: jax.Array, amax: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the results for checked arguments."""
    found = config.outputs.rounded(derivative(config, dz, x))
    results = config.outputs.in_jax(found, scale, amax)
    sums = found.sum(tuple(range(x.ndim - 2))) if config.is_dbias else jnp.zeros((1,), jnp.float32)
    return (*results, sums.astype(x.dtype))


def derivative(config: ActivationConfig, dz: jax.Array, x: jax.Array) -> jax.Array:
    """Return dx in float32."""
    wide, dz = x.astype(jnp.float32), dz.astype(jnp.float32)
    value, slope = _point(config, wide[..., 0, :])
    if not config.is_gated:
        return (dz * slope)[..., None, :]
    factor, follows = _gate(config, wide[..., 1, :])
    return jnp.stack([dz * slope * factor, dz * value * follows], axis=-2)


def _clamped(config: ActivationConfig) -> ClampedSwigluParams:
    return config.params.clamped_swiglu


def _swish(x: jax.Array, u: jax.Array, slope: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """Return x * sigmoid(u) and its derivative, with u' = slope."""
    gate = jax.nn.sigmoid(u)
    change = gate * jax.nn.sigmoid(-u)
    # Where a factor is 0, x may be infinite, and their product NaN.
    rest = jnp.where(change == 0, 0, x * slope * change)
    return jnp.where(gate == 0, 0, x * gate), gate + rest


def _point(config: ActivationConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the function of the first part, and its derivative."""
    name = config.activation_type[0]
    if name == "gelu":
        square = x * x
        root, cube = 1.5957691216, 0.0713548163  # 2 sqrt(2 / pi), that times 0.044715
        return _swish(x, x * (root + cube * square), root + 3 * cube * square)
    if name == "sigmoid":
        gate = jax.nn.sigmoid(x)
        return gate, gate * jax.nn.sigmoid(-x)
    if name == "silu":
        return _swish(x, x, 1.0)
    if name == "quick_gelu":
        return _swish(x, 1.702 * x, 1.702)
    if name == "clamped_silu":
        given = _clamped(config)
        cut = jnp.minimum(x, given.limit)
        value, slope = _swish(cut, given.alpha * cut, given.alpha)
        return value, jnp.where(x > given.limit, 0, slope)
    part = jnp.where(x <= 0, 0, x)
    if name == "relu":
        return part, (x > 0).astype(jnp.float32)
    return part * part, 2 * part


def _gate(config: ActivationConfig, x: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Return the factor that the second part gives, and its derivative."""
    if config.activation_type[1] == "linear":
        return x, 1.0
    given = _clamped(config)
    cut = jnp.clip(x, -given.limit, given.limit)
    return cut + given.glu_linear_offset, (cut == x).astype(jnp.float32)
