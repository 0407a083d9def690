"""Trains a Flax NNX transformer on handwritten digits, in float and in int8; stores both in int4.

uv run python examples/quantize_nnx.py
"""

import jax.numpy as jnp
import optax
from flax import nnx

import provider_xla as xla
from interception_core.demo_kit import Digits

WIDTH = 32
DIGITS = Digits.load()


class Block(nnx.Module):
    """Attention over the rows of an image, and a perceptron."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attn = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    @nnx.jit
    def __call__(self, x):
        x = x + self.attn(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Net(nnx.Module):
    """Rows of pixels in, ten logits out."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(8, WIDTH, rngs=rngs)
        self.places = nnx.Embed(8, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = self.embed(images) + self.places(jnp.arange(8))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))


@nnx.jit
def train_step(model, optimizer, images, labels):
    """Updates the model."""

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def train(model, epochs=7):
    """Trains on batches of 64."""
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    for images, labels in DIGITS.batches(epochs):
        train_step(model, optimizer, images, labels)
    return model


@nnx.jit
def accuracy(model):
    """Returns the share of the test images whose digit the model finds."""
    return jnp.mean(model(DIGITS.test_images).argmax(axis=1) == DIGITS.test_labels)


def main():
    """Trains twice, stores, and compares."""
    # Rules name modules by their attributes.
    int8 = xla.QtRule(module_path="blocks/.*", weight_qtype="int8", act_qtype="int8")
    int4 = [
        xla.QuantizationRule(module_path="(embed|head)"),  # stay float
        xla.QuantizationRule(weight_qtype="int4", tile_size=8),
    ]

    plain = train(Net(nnx.Rngs(0)))
    aware = train(xla.quantize_model(Net(nnx.Rngs(0)), xla.QtProvider(int8)))
    print(f"trained in float: {accuracy(plain):.1%}, with int8 contractions: {accuracy(aware):.1%}")

    for name, model in {"float": plain, "int8": aware}.items():
        stored = xla.quantize_model(model, xla.PtqProvider(int4), DIGITS.test_images[:1])
        plan = xla.model_plan(stored)
        print(f"trained in {name}, stored in int4: {accuracy(stored):.1%}, "
              f"{plan.bytes_before:,} -> {plan.bytes_after:,} bytes")  # fmt: skip
    print(plan)


if __name__ == "__main__":
    main()
