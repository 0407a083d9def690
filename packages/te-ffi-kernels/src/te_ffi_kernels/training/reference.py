"""Quantizing for training in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .config import Config, Noise, operands_of

_TINY = np.float32(np.finfo(np.float32).tiny)
_INVERSE = np.float32(1) / np.float32(127)
_LARGEST_DIVISOR = np.float32(2.0**126)


def quantize_int8(
    config: Config, x: jax.Array, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return quantized values and scales for checked arguments."""
    factors, given, key = operands_of(config, *operands)
    along, others = (-1, -2) if config.by_row else (-2, -1)
    values = x.astype(jnp.float32)
    if factors is not None:
        values = values * jnp.expand_dims(factors, others)
    most = jnp.max(jnp.abs(values), axis=along, keepdims=True, initial=0)
    # Times inverses, as XLA divides by what is broadcast. In this order, a NaN stays.
    scale = lax.clamp(_TINY, most * _INVERSE, np.float32(np.inf))
    steps = values * (1 / lax.clamp(np.float32(0), scale, _LARGEST_DIVISOR))
    noise = None if given is None else given[..., None]
    noise = noise if key is None else _noise(config, key, x.shape)
    if noise is not None:
        # What is clamped keeps XLA from a fused multiply-add, which rounds otherwise.
        steps = lax.clamp(np.float32(-512), steps, np.float32(512)) + noise
    rounded = lax.clamp(np.float32(-127), lax.round(steps, lax.RoundingMethod(1)), np.float32(127))
    qvalue = jnp.where(steps == steps, rounded, 0).astype(jnp.int8)
    return qvalue, jnp.squeeze(scale, along)


def _noise(config: Config, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    def draw(words: jax.Array) -> jax.Array:
        with jax.threefry_partitionable(True):
            whole = jax.random.wrap_key_data(words, impl="threefry2x32")
            return jax.random.bits(whole, shape[-3:])

    bits = jax.vmap(draw)(key.reshape(-1, 2)).reshape(shape)
    if config.noise is Noise.LOW_BITS:
        return ((bits & 0xFF).astype(jnp.float32) + 0.5) / 256 - 0.5
    noise = (bits >> 9).astype(jnp.float32) * np.float32(2.0**-23) - 0.5
    return jnp.maximum(noise, np.float32(-0.5 + 2.0**-24))
