"""Philox 4x32-10 (Salmon et al. 2011), which draws the same words as the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def philox(counter: Words, key: tuple[jax.Array, jax.Array]) -> Words:
    """Return four random uint32 words for a counter of four."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(10):
        high0, low0 = _product(0xD2511F53, c0)
        high1, low1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = key0 + jnp.uint32(0x9E3779B9)
        key1 = key1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def _product(factor: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the high and low half of a 64-bit product."""
    high, low = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    x_high, x_low = x >> 16, x & jnp.uint32(0xFFFF)
    middle = low * x_high + ((low * x_low) >> 16)
    carry = high * x_low + (middle & jnp.uint32(0xFFFF))
    return high * x_high + (middle >> 16) + (carry >> 16), jnp.uint32(factor) * x
