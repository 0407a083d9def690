"""The two models: functions of a parameter pytree and 8x8 images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, jax.Array]
CLASSES = 10


@dataclass(frozen=True)
class Model:
    """A classifier.

    Attributes:
        name: what to call it.
        init: makes the parameters from a random key.
        apply: parameters and images, f32 [N, 8, 8], to logits, f32 [N, 10].
    """

    name: str
    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, jax.Array], jax.Array]


def _he_normal(key: jax.Array, shapes: dict[str, Sequence[int]]) -> Params:
    keys = jax.random.split(key, len(shapes))
    init = jax.nn.initializers.he_normal()
    return {name: init(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def _conv_init(key: jax.Array) -> Params:
    return _he_normal(
        key,
        {
            "conv1": (3, 3, 1, 16),
            "conv2": (3, 3, 16, 32),
            "dense": (512, 64),
            "head": (64, CLASSES),
        },
    )


def _conv_apply(params: Params, images: jax.Array) -> jax.Array:
    def conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        strides = (stride, stride)
        return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=layout)

    x = images[..., None]
    with jax.named_scope("features"):
        x = jax.nn.relu(conv(x, params["conv1"], 1))
        x = jax.nn.relu(conv(x, params["conv2"], 2))
    with jax.named_scope("classifier"):
        x = jax.nn.relu(x.reshape(len(images), -1) @ params["dense"])
        return x @ params["head"]


WIDTH, HEADS = 32, 4


def _attention_init(key: jax.Array) -> Params:
    return _he_normal(
        key,
        {
            "embed": (8, WIDTH),
            "position": (8, WIDTH),
            "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": (HEADS, WIDTH // HEADS, WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH),
            "head": (8 * WIDTH, CLASSES),
        },
    )


def _attention_apply(params: Params, images: jax.Array) -> jax.Array:
    with jax.named_scope("embed"):  # each row of pixels is a token
        x = jnp.einsum("npd,de->npe", images, params["embed"]) + params["position"][None]
    with jax.named_scope("attention"):
        q, k, v = jnp.einsum("npe,eshd->snphd", _normalize(x), params["qkv"])
        scores = jnp.einsum("nphd,nqhd->nhpq", q, k) * (q.shape[-1] ** -0.5)
        mixed = jnp.einsum("nhpq,nqhd->nphd", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("nphd,hde->npe", mixed, params["out"])
    with jax.named_scope("mlp"):
        x = x + jax.nn.gelu(_normalize(x) @ params["up"]) @ params["down"]
    with jax.named_scope("classifier"):
        return _normalize(x).reshape(len(images), -1) @ params["head"]


def _normalize(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-6)


MODELS = (
    Model("convolutional", _conv_init, _conv_apply),
    Model("attention", _attention_init, _attention_apply),
)
