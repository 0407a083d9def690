"""Models of handwritten digits, and their training.

Each is a function ``fn(variables, images, train=False)``. With ``train=True`` it returns the
logits, and all variables but the parameters, as they are afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import lax

from interception_core.demo_kit import BATCH, Digits

CLASSES = 10


@functools.cache
def load_digits() -> Digits:
    """Return the digits, 8x8x1."""
    return Digits.load(shape=(8, 8, 1))


def some_batches(digits: Digits, count: int) -> list[np.ndarray]:
    """Return the images of some training batches."""
    return [images for images, _ in itertools.islice(digits.batches(), count)]


# Flax Linen


class Cnn(linen.Module):
    """Convolutions with BatchNorm, pools, and two dense layers."""

    @linen.compact
    def __call__(self, x, train=False):
        for features in (12, 24):
            x = linen.Conv(features, (3, 3))(x)
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = linen.avg_pool(linen.relu(x), (2, 2), (2, 2))
        x = linen.relu(linen.Dense(32)(x.reshape(x.shape[0], -1)))
        return linen.Dense(CLASSES)(x)


class Residual(linen.Module):
    """A convolutional net with a residual block."""

    @linen.compact
    def __call__(self, x, train=False):
        norm = functools.partial(
            linen.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5
        )
        x = linen.relu(norm()(linen.Conv(8, (3, 3), use_bias=False)(x)))
        x = linen.max_pool(x, (2, 2), (2, 2))
        y = linen.relu(norm()(linen.Conv(16, (3, 3), use_bias=False)(x)))
        y = norm()(linen.Conv(16, (3, 3), use_bias=False)(y))
        x = norm(name="norm_of_projection")(linen.Conv(16, (1, 1), name="proj")(x))
        return linen.Dense(CLASSES)(jnp.mean(linen.relu(x + y), axis=(1, 2)))


class MobileNet(linen.Module):
    """Depthwise and pointwise convolutions with relu6, and an inverted residual."""

    @linen.compact
    def __call__(self, x, train=False):
        def layer(x, features, kernel=(1, 1), relu6=True, **options):
            x = linen.Conv(features, kernel, use_bias=False, **options)(x)
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            return jax.nn.relu6(x) if relu6 else x

        x = layer(x, 16, (3, 3))
        y = layer(x, 32)
        y = layer(y, 32, (3, 3), feature_group_count=32)
        x = x + layer(y, 16, relu6=False)
        x = layer(x, 32, strides=(2, 2))
        return linen.Dense(CLASSES)(jnp.mean(x, axis=(1, 2)))


class Attention(linen.Module):
    """A small vision transformer: a token for each row, one pre-norm block."""

    width: int = 32

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Conv(self.width, (1, 8), strides=(1, 8), name="rows")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        place = linen.initializers.normal(0.2)
        x = x + self.param("places", place, (1, x.shape[1], self.width))
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=4)(h, h)
        h = linen.gelu(linen.Dense(2 * self.width)(linen.LayerNorm()(x)))
        x = x + linen.Dense(self.width)(h)
        return linen.Dense(CLASSES)(jnp.mean(linen.LayerNorm()(x), axis=1))


def of_linen(module: linen.Module) -> Model:
    def apply(variables, x, train=False):
        if not train:
            return module.apply(variables, x)
        return module.apply(variables, x, train=True, mutable=["batch_stats"])

    return Model(type(module).__name__, lambda key: module.init(key, IMAGE), apply)


# Plain JAX


def _norm(p, x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-6) * p["scale"] + p["bias"]


def _layer(x, p):
    h = _norm(p["norm1"], x)
    q, k, v = (jnp.einsum("btd,dhe->bthe", h, p[name]) for name in "qkv")
    x = x + jnp.einsum("bthe,hed->btd", jax.nn.dot_product_attention(q, k, v), p["out"])
    return x + jax.nn.gelu(_norm(p["norm2"], x) @ p["up"]) @ p["down"], None


def _encoder(variables, x, train=False):
    """Return a transformer encoder of image rows, with a rolled scan."""
    p = variables["params"]
    x = x.reshape(x.shape[0], 8, 8) @ p["embed"] + p["places"]
    x, _ = lax.scan(_layer, x, p["layers"])
    logits = jnp.mean(_norm(p["norm"], x), axis=1) @ p["head"]
    return (logits, {}) if train else logits


def _encoder_init(key, layers=2, width=32, heads=4):
    shapes = dict.fromkeys("qkv", (layers, width, heads, width // heads))
    shapes |= {"out": (layers, heads, width // heads, width)}
    shapes |= {"up": (layers, width, 2 * width), "down": (layers, 2 * width, width)}
    keys = iter(jax.random.split(key, len(shapes) + 3))

    def draw(shape, fan):
        return jax.random.normal(next(keys), shape) * np.float32(fan**-0.5)

    def unit(*lead):
        return {"scale": jnp.ones((*lead, width)), "bias": jnp.zeros((*lead, width))}

    stacked = {n: draw(s, 2 * width if n == "down" else width) for n, s in shapes.items()}
    return {
        "params": {
            "embed": draw((8, width), 8),
            "places": draw((8, width), 8),
            "layers": stacked | {"norm1": unit(layers), "norm2": unit(layers)},
            "norm": unit(),
            "head": draw((width, CLASSES), width),
        }
    }


def _mlp(variables, x, train=False):
    p = variables["params"]
    x = x.reshape(x.shape[0], -1)
    x = jnp.tanh(x @ p["w0"] + p["b0"])
    logits = jax.nn.sigmoid(x @ p["w1"] + p["b1"]) @ p["w2"]
    return (logits, {}) if train else logits


def _mlp_init(key):
    k0, k1, k2 = jax.random.split(key, 3)
    shapes = {"w0": (k0, (64, 48)), "w1": (k1, (48, 32)), "w2": (k2, (32, CLASSES))}
    weights = {
        name: jax.random.normal(key, shape) * np.float32(shape[0] ** -0.5)
        for name, (key, shape) in shapes.items()
    }
    return {"params": weights | {"b0": jnp.zeros(48), "b1": jnp.zeros(32)}}


# NNX and Equinox


class NnxNet(nnx.Module):
    """A convolution, LayerNorm, silu and dense layers."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 12, (3, 3), strides=(2, 2), rngs=rngs)
        self.up = nnx.Linear(4 * 4 * 12, 48, rngs=rngs)
        self.norm = nnx.LayerNorm(48, rngs=rngs)
        self.out = nnx.Linear(48, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x))
        x = self.norm(self.up(x.reshape(x.shape[0], -1)))
        return self.out(nnx.silu(x))


def _nnx() -> Model:
    graphdef, _ = nnx.split(NnxNet(nnx.Rngs(0)))

    def init(key):
        return {"params": nnx.split(NnxNet(nnx.Rngs(key)))[1]}

    def apply(variables, x, train=False):
        logits = nnx.merge(graphdef, variables["params"])(x)
        return (logits, {}) if train else logits

    return Model("nnx", init, apply)


class EqxNet(eqx.Module):
    """For one image, channels first; the batch is ``vmap``'s."""

    conv: eqx.nn.Conv2d
    hidden: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(1, 8, 3, padding=1, key=keys[0])
        self.hidden = eqx.nn.Linear(8 * 4 * 4, 32, key=keys[1])
        self.out = eqx.nn.Linear(32, CLASSES, key=keys[2])

    def __call__(self, x):
        x = jax.nn.relu(self.conv(x.transpose(2, 0, 1)))
        x = eqx.nn.AvgPool2d(2, 2)(x)
        return self.out(jax.nn.relu(self.hidden(x.reshape(-1))))


def _equinox() -> Model:
    def init(key):
        return {"params": eqx.filter(EqxNet(key), eqx.is_array)}

    _, static = eqx.partition(EqxNet(jax.random.key(0)), eqx.is_array)

    def apply(variables, x, train=False):
        logits = jax.vmap(eqx.combine(variables["params"], static))(x)
        return (logits, {}) if train else logits

    return Model("equinox", init, apply)


# Training


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of images.

    Attributes:
        name: of the model.
        init: its first variables, from a key.
        apply: see above.
    """

    name: str
    init: Callable[[jax.Array], Any]
    apply: Callable[..., Any]


IMAGE = np.zeros((1, 8, 8, 1), np.float32)
MODELS = {
    "cnn": of_linen(Cnn()),
    "attention": of_linen(Attention()),
    "residual": of_linen(Residual()),
    "mobilenet": of_linen(MobileNet()),
    "scanned encoder": Model("scanned encoder", _encoder_init, _encoder),
    "nnx": _nnx(),
    "equinox": _equinox(),
    "plain": Model("plain", _mlp_init, _mlp),
}


def train(model, digits, *, epochs, variables=None, quantized=None, stats=None, rate=1e-2):
    """Trains with Adam; with QAT where ``quantized`` and its ``stats`` are given.

    Returns:
        The variables. The statistics change in place.
    """
    fn = functools.partial(quantized, quant_stats=stats) if quantized else model.apply
    variables = model.init(jax.random.key(0)) if variables is None else variables
    steps = epochs * (len(digits.train_images) // BATCH)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    state = optimizer.init(variables["params"])

    def loss(params, variables, images, labels):
        logits, others = fn({**variables, "params": params}, images, train=True)
        own = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return own, others

    @jax.jit
    def step(variables, state, images, labels):
        grads, others = jax.grad(loss, has_aux=True)(variables["params"], variables, images, labels)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(variables["params"], updates)
        return {**variables, **others, "params": params}, state

    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        for images, labels in digits.batches(epochs):
            variables, state = step(variables, state, images, labels)
    return variables


def accuracy(logits, labels) -> float:
    """Return the share of images whose class is right."""
    return float(np.mean(np.asarray(logits).argmax(axis=-1) == labels))
