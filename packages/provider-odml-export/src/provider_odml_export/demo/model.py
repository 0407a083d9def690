"""The model: a plain function of a parameter pytree and a batch of 8x8 images."""

from __future__ import annotations

import jax
from jax import lax

Params = dict[str, dict[str, jax.Array]]
CLASSES = 10
_SHAPES = {
    "conv1": (3, 3, 1, 12),
    "conv2": (3, 3, 12, 24),
    "dense": (4 * 4 * 24, 48),
    "head": (48, CLASSES),
}


def init(key: jax.Array) -> Params:
    """Return the first parameters."""
    draw = jax.nn.initializers.he_normal()
    zeros = jax.nn.initializers.zeros
    keys = jax.random.split(key, len(_SHAPES))
    return {
        name: {"kernel": draw(k, shape), "bias": zeros(k, shape[-1:])}
        for k, (name, shape) in zip(keys, _SHAPES.items(), strict=True)
    }


def apply(params: Params, image: jax.Array) -> jax.Array:
    """Return logits, f32 [N, 10], of images, f32 [N, 8, 8, 1]."""

    def conv(x: jax.Array, name: str, stride: int) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        with jax.named_scope(name):
            x = lax.conv_general_dilated(x, kernel, (stride, stride), "SAME",
                                         dimension_numbers=layout)  # fmt: skip
            return jax.nn.relu(x + bias)

    def dense(x: jax.Array, name: str) -> jax.Array:
        with jax.named_scope(name):
            return x @ params[name]["kernel"] + params[name]["bias"]

    x = conv(conv(image, "conv1", 1), "conv2", 2)
    x = jax.nn.relu(dense(x.reshape(x.shape[0], -1), "dense"))
    return dense(x, "head")
