"""Bridge nets: the same small models in each framework."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule

WIDTH, WORDS, CLASSES, HEADS = 16, 11, 3, 4
TOKENS = jnp.arange(14).reshape(2, 7) % WORDS
WEIGHTS = QuantizationRule(weight_qtype="int8")
BOTH = QtRule(weight_qtype="int8", act_qtype="int8")


def ptq(*rules, **options):
    return PtqProvider(rules or (WEIGHTS,), **options)


def qat(*rules, **options):
    return QtProvider(rules or (BOTH,), **options)


def dequantized(tree):
    """Return a tree with stored parameters as floats, computed by NumPy."""

    def one(leaf):
        if not isinstance(leaf, qn.QArray):
            return leaf
        qvalue, scale = np.asarray(leaf.qvalue, np.float64), np.asarray(leaf.scale, np.float64)
        return jnp.asarray(qvalue * scale, leaf.dtype)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, qn.QArray))


def count_stored(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, qn.QArray))
    return sum(isinstance(leaf, qn.QArray) for leaf in leaves)


def close(actual, expected, tolerance=2e-5):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def differs(actual, expected):
    """Say that a result is that of something quantized: near, and another."""
    error = np.linalg.norm(np.asarray(actual) - np.asarray(expected))
    assert 1e-4 < error / np.linalg.norm(np.asarray(expected)) < 0.2


@functools.cache
def nnx_classes():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
            self.down = nnx.Linear(32, WIDTH, rngs=rngs)

        # Not "self": nothing depends on what the receiver is called.
        def __call__(this, x):
            x = x + this.attn(this.norm(x))
            return x + this.down(nnx.gelu(this.up(x)))

    class Light(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
            self.down = nnx.Linear(32, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Net(nnx.Module):
        def __init__(self, rngs, block=Light):
            self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
            self.blocks = nnx.List([block(rngs) for _ in range(2)])
            self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, tokens):
            return self.head(self.features(tokens))

        def features(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return x.mean(axis=1)

    return Net, Block, Light


def nnx_net(**options):
    from flax import nnx

    return nnx_classes()[0](nnx.Rngs(0), **options)


@functools.cache
def linen_classes():
    from flax import linen

    class Block(linen.Module):
        width: int

        @linen.compact
        def __call__(this, x):
            h = linen.LayerNorm(name="norm")(x)
            x = x + linen.MultiHeadDotProductAttention(HEADS, name="attn")(h)
            h = linen.gelu(linen.Dense(32, name="up")(x))
            return x + linen.Dense(this.width, name="down")(h)

    class Light(linen.Module):
        width: int

        @linen.compact
        def __call__(self, x):
            h = linen.gelu(linen.Dense(32, name="up")(linen.LayerNorm(name="norm")(x)))
            return x + linen.Dense(self.width, name="down")(h)

    class Net(linen.Module):
        block: type = Light

        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(WORDS, WIDTH, name="embed")(tokens)
            for i in range(2):
                x = self.block(WIDTH, name=f"block_{i}")(x)
            return linen.Dense(CLASSES, name="head")(x.mean(axis=1))

    return Net, Block, Light


def linen_net(**options):
    net = linen_classes()[0](**options)
    return net, net.init(jax.random.key(0), TOKENS)


@functools.cache
def equinox_classes():
    import equinox as eqx

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        attn: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.attn = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 32, 1, jax.nn.gelu, key=second)

        def __call__(this, x):
            h = jax.vmap(this.norm)(x)
            x = x + this.attn(h, h, h)
            return x + jax.vmap(this.mlp)(x)

    class Light(eqx.Module):
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key):
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 32, 1, jax.nn.gelu, key=key)

        def __call__(self, x):
            return x + jax.vmap(lambda row: self.mlp(self.norm(row)))(x)

    class Net(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key, block=Light):
            keys = jax.random.split(key, 4)
            self.embed = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0])
            self.blocks = [block(keys[1]), block(keys[2])]
            self.head = eqx.nn.Linear(WIDTH, CLASSES, key=keys[3])

        def __call__(self, tokens):
            return self.head(self.features(tokens))

        def features(self, tokens):
            x = jax.vmap(self.embed)(tokens)
            for block in self.blocks:
                x = block(x)
            return x.mean(axis=0)

    return Net, Block, Light


def equinox_net(**options):
    return equinox_classes()[0](jax.random.key(0), **options)
