"""Trains an Equinox transformer on handwritten digits, then stores its weights in int8.

uv run python examples/quantize_equinox.py
"""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import provider_xla as xla
from interception_core.demo_kit import Digits

WIDTH = 32
DIGITS = Digits.load()


class Block(eqx.Module):
    """Attention over the rows of an image, and a perceptron."""

    norms: list
    attn: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.attn = eqx.nn.MultiheadAttention(4, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second)

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attn(h, h, h)
        return x + jax.vmap(lambda row: self.mlp(self.norms[1](row)))(x)


class Net(eqx.Module):
    """The rows of one image in, ten logits out."""

    embed: eqx.nn.Linear
    places: eqx.nn.Embedding
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Linear(8, WIDTH, key=keys[0])
        self.places = eqx.nn.Embedding(8, WIDTH, key=keys[1])
        self.blocks = [Block(keys[2]), Block(keys[3])]
        self.head = eqx.nn.Linear(WIDTH, 10, key=keys[4])

    def __call__(self, image):
        x = jax.vmap(self.embed)(image) + jax.vmap(self.places)(jnp.arange(8))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=0))


def train(model, epochs=7):
    """Returns the model, trained on batches of 64."""
    optimizer = optax.adam(5e-3)

    @eqx.filter_jit
    def train_step(model, state, images, labels):
        @eqx.filter_grad
        def grad(model):
            logits = jax.vmap(model)(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = optimizer.update(grad(model), state)
        return eqx.apply_updates(model, updates), state

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for images, labels in DIGITS.batches(epochs):
        model, state = train_step(model, state, images, labels)
    return model


@eqx.filter_jit
def accuracy(model):
    """Returns the share of the test images whose digit the model finds."""
    return jnp.mean(jax.vmap(model)(DIGITS.test_images).argmax(axis=1) == DIGITS.test_labels)


def main():
    """Trains with quantized contractions, stores the weights, and compares."""
    # Rules name modules by their attributes.
    aware = xla.QtRule(module_path="blocks/.*", weight_qtype="int8", act_qtype="int8")
    rules = [
        xla.QuantizationRule(module_path="(embed|head)"),  # stay float
        xla.QuantizationRule(module_path=".*/mlp/.*", weight_qtype="int8", act_qtype="int8"),
        xla.QuantizationRule(module_path=".*/attn/.*", weight_qtype="int8", tile_size=8),
    ]

    model = train(xla.quantize_model(Net(jax.random.key(0)), xla.QtProvider(aware)))
    print(f"trained with int8 contractions: {accuracy(model):.1%}")
    stored = xla.quantize_model(model, xla.PtqProvider(rules), DIGITS.test_images[0])
    print(xla.model_plan(stored))
    print(f"stored: {accuracy(stored):.1%}")

    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, stored)
    file.seek(0)
    read = eqx.tree_deserialise_leaves(file, stored)
    print(f"saved in {file.tell():,} bytes, loaded: {accuracy(read):.1%}")


if __name__ == "__main__":
    main()
