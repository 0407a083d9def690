"""Small programs for tests of provider-odml, and NumPy references."""

import functools

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from provider_odml import OdmlRule, qat

W8A8 = OdmlRule(weight_qtype="int8", output_qtype="int8")
W8A16 = OdmlRule(weight_qtype="int8", output_qtype="int16")


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plan_of(fn, params, *args, rules=(W8A8,), **options):
    return qat(fn, rules, **options).plan(params, *args)


def mlp(params, x):
    h = jax.nn.relu(x @ params["w"] + params["b"])
    return jnp.concatenate([h, jnp.tanh(h)], -1) @ params["v"]


MLP = {"w": draw(6, 8, seed=1), "b": draw(8, seed=2), "v": draw(16, 3, seed=3)}


def avg_pool(x):
    with jax.numpy_dtype_promotion("standard"):  # it divides by an int32 of NumPy's
        return nn.avg_pool(x, (2, 2), (2, 2))


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x)
        x = avg_pool(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.softmax(nn.Dense(3)(x.reshape(x.shape[0], -1)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.down = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


class Net(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    down: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(6, 8, key=first)
        self.norm = eqx.nn.LayerNorm(8)
        self.down = eqx.nn.Linear(8, 3, key=second)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.norm(self.up(x))))


@functools.cache
def linen():
    model, x = Cnn(), draw(2, 8, 8, 1)
    return model.apply, jax.jit(model.init)(jax.random.key(0), x), x


@functools.cache
def nnx_block():
    graphdef, state = nnx.split(Block(nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graphdef, state)(x), state, draw(4, 6)


@functools.cache
def equinox():
    return lambda model, x: jax.vmap(model)(x), Net(jax.random.key(0)), draw(4, 6)


@functools.cache
def plain():
    return mlp, MLP, draw(4, 6)


@functools.cache
def nested():
    """A plain function with a jitted block that is called twice."""
    layer = jax.jit(lambda w, h: jax.nn.relu(h @ w))
    return lambda w, x: layer(w, layer(w, x)), draw(6, 6, seed=1), draw(4, 6)


MODELS = {"linen": linen, "nnx": nnx_block, "equinox": equinox, "plain": plain, "nested": nested}


# Fake quantization in NumPy, float64 but for the scale, which LiteRT keeps in float32.


def fake_quant_int8(x, lower, upper):
    """Codes from -128 to 127 with a zero point, and back."""
    lower, upper = min(float(lower), 0.0), max(float(upper), 0.0)
    scale = np.float64(np.float32((upper - lower) / 255))
    zero_point = np.clip(np.rint(-128 - lower / scale), -128, 127)
    codes = np.clip(np.rint(np.asarray(x, np.float64) / scale) + zero_point, -128, 127)
    return (codes - zero_point) * scale


def fake_quant_symmetric(x, bound, qmax):
    """Codes from -qmax to qmax, and back."""
    scale = np.float64(np.float32(np.asarray(bound, np.float64) / qmax))
    return np.clip(np.rint(np.asarray(x, np.float64) / scale), -qmax, qmax) * scale


def fake_quant_weight(w, qmax, channel_axes):
    """The same with the largest magnitude of each channel for a bound."""
    reduced = tuple(a for a in range(np.ndim(w)) if a not in channel_axes)
    bound = np.abs(np.asarray(w, np.float64)).max(axis=reduced, keepdims=True)
    return fake_quant_symmetric(w, bound, qmax)


def block_scales(w, size, qmax):
    """The scales of a matrix's blocks along its first axis, in the file's float16, float64."""
    parts = np.asarray(w, np.float32).reshape(-1, size, w.shape[1])
    scale = np.abs(parts).max(1) / np.float32(qmax)
    with np.errstate(under="ignore"):
        # Eight digits, as XNNPACK has them, and float16's range.
        short = scale.astype(jnp.bfloat16).astype(np.float32).astype(np.float16)
    return np.maximum(short.astype(np.float64), 2.0**-24)


def fake_quant_blocks(w, size, qmax):
    """Rounds a matrix in blocks along its first axis, float64."""
    scale = np.repeat(block_scales(w, size, qmax), size, axis=0)
    return np.clip(np.rint(np.float32(w) / np.float32(scale)), -qmax, qmax) * scale
