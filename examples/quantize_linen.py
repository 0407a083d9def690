"""Trains a Flax Linen transformer on handwritten digits, quantizes it by module paths, saves it.

uv run python examples/quantize_linen.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen, serialization

import provider_xla as xla
from interception_core.demo_kit import Digits

WIDTH = 32
DIGITS = Digits.load()


class Block(linen.Module):
    """Attention over the rows of an image, and a perceptron."""

    @linen.compact
    def __call__(self, x):
        x = x + linen.MultiHeadDotProductAttention(4, name="attn")(linen.LayerNorm()(x))
        h = linen.gelu(linen.Dense(4 * WIDTH, name="up")(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH, name="down")(h)


class Net(linen.Module):
    """Rows of pixels in, ten logits out."""

    @linen.compact
    def __call__(self, images):
        x = linen.Dense(WIDTH, name="embed")(images)
        x = x + linen.Embed(8, WIDTH, name="places")(jnp.arange(8))
        for i in range(2):
            x = linen.remat(Block)(name=f"block_{i}")(x)
        return linen.Dense(10, name="head")(x.mean(axis=1))


def train(net, variables, epochs=7):
    """Returns the variables, trained on batches of 64."""
    optimizer = optax.adam(5e-3)

    @jax.jit
    def train_step(variables, state, images, labels):
        def loss(variables):
            logits = net.apply(variables, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = optimizer.update(jax.grad(loss)(variables), state)
        return optax.apply_updates(variables, updates), state

    state = optimizer.init(variables)
    for images, labels in DIGITS.batches(epochs):
        variables, state = train_step(variables, state, images, labels)
    return variables


def accuracy(net, variables):
    """Returns the share of the test images whose digit the model finds."""
    logits = jax.jit(net.apply)(variables, DIGITS.test_images)
    return jnp.mean(logits.argmax(axis=1) == DIGITS.test_labels)


def main():
    """Trains with quantized contractions, stores the variables, and compares."""
    # Linen's paths begin with the class of the model.
    aware = xla.QtRule(module_path="Net/block.*", weight_qtype="int8", act_qtype="int8")
    rules = [
        xla.QuantizationRule(module_path="Net/(embed|head)"),  # stay float
        xla.QuantizationRule(module_path=".*/(up|down)", weight_qtype="int4", tile_size=8),
        xla.QuantizationRule(module_path=".*/attn.*", weight_qtype="int8", act_qtype="int8"),
    ]

    net = xla.quantize_model(Net(), xla.QtProvider(aware))  # unbound: what apply runs
    variables = train(net, net.init(jax.random.key(0), DIGITS.test_images[:1]))
    print(f"trained with int8 contractions: {accuracy(net, variables):.1%}")

    bound = xla.quantize_model(
        Net().bind(variables), xla.PtqProvider(rules), DIGITS.test_images[:1]
    )
    print(xla.model_plan(bound))
    stored_net, stored = bound.unbind()
    print(f"stored: {accuracy(stored_net, stored):.1%}")

    written = serialization.to_bytes(stored)
    read = serialization.from_bytes(stored, written)
    print(f"saved in {len(written):,} bytes, loaded: {accuracy(stored_net, read):.1%}")


if __name__ == "__main__":
    main()
