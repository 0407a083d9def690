"""The Flax networks that are timed."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

LAYERS, WIDTH, HEADS, TOKENS = 16, 64, 4, 16


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        q, k, v = (
            linen.DenseGeneral((HEADS, WIDTH // HEADS), name=name)(linen.LayerNorm()(x))
            for name in "qkv"
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS).astype(np.float32)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + linen.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(mixed)
        h = linen.gelu(linen.Dense(4 * WIDTH, name="up")(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH, name="down")(h)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = Block(name=f"layer_{i}")(x)
        return linen.Dense(10, name="head")(x)


class Step(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return Block(name="block")(x), None


class ScannedNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        scanned = linen.scan(
            Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=24
        )
        x, _ = scanned(name="layers")(x, None)
        return linen.Dense(10, name="head")(x)


X = jnp.ones((2, TOKENS, WIDTH))
