"""Teaches a digits model, quantized to 4 bits, to read digits that are turned by 90 degrees.

The base was trained on upright digits. Full fine-tuning changes all of its 15,360 numbers; QLoRA
keeps them as nf4 quantized values, and trains 6,544 numbers of adapters beside them.

uv run python examples/qlora_digits.py
"""

import jax
import numpy as np
import optax

from interception_core.demo_kit import BATCH, Digits
from jaxtap.demo import MODELS, train
from provider_xla import LoraRule, PtqProvider

MODEL = MODELS[1]  # attention
EPOCHS = 12
RULE = LoraRule(weight_qtype="nf4", rank=8, alpha=16, dropout=0.05)


def turned(images):
    """Digits turned by 90 degrees: the base reads one in ten of them."""
    return np.rot90(images, axes=(1, 2)).copy()


def fine_tuned(loss, params, digits, learning_rate, epochs=EPOCHS):
    """Trains with Adam, on turned digits.

    Args:
        loss: takes the parameters, images, labels and a random key.
        params: where to begin.
        digits: the data.
        learning_rate: at first; it decays to zero.
        epochs: how often each image is seen.
    """
    steps = len(digits.train_images) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps * epochs))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels, key):
        updates, state = optimizer.update(jax.grad(loss)(params, images, labels, key), state)
        return optax.apply_updates(params, updates), state

    key = jax.random.key(0)
    for images, labels in digits.batches(epochs):
        key, dropout_key = jax.random.split(key)
        params, state = step(params, state, turned(images), labels, dropout_key)
    return params


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(apply, digits):
    """Returns the share of the turned test digits that are read right."""
    found = np.asarray(jax.jit(apply)(turned(digits.test_images))).argmax(axis=-1)
    return float(np.mean(found == digits.test_labels))


def main():
    """Compares the base, full fine-tuning and QLoRA."""
    digits = Digits.load(seed=0)
    base = train(MODEL, digits, seed=0, advance=lambda: None)

    full = fine_tuned(
        lambda params, images, labels, key: cross_entropy(MODEL.apply(params, images), labels),
        base,
        digits,
        learning_rate=3e-3,
    )

    plan = PtqProvider(RULE).plan(MODEL.apply, base, digits.train_images[:BATCH])
    print(plan)
    stored, run = plan.quantize(base), plan.apply(MODEL.apply)
    adapters = fine_tuned(
        lambda adapters, images, labels, key: cross_entropy(
            run(stored, images, adapters=adapters, dropout_key=key), labels
        ),
        plan.init_adapters(jax.random.key(1)),
        digits,
        learning_rate=1e-2,
    )
    merged = plan.merge(stored, adapters)

    results = {
        "base, not fine-tuned": accuracy(lambda x: MODEL.apply(base, x), digits),
        "fine-tuned in full": accuracy(lambda x: MODEL.apply(full, x), digits),
        "QLoRA, nf4 and adapters": accuracy(lambda x: run(stored, x, adapters=adapters), digits),
        "merged, float": accuracy(lambda x: MODEL.apply(merged, x), digits),
    }
    print()
    for name, share in results.items():
        print(f"{name:<24} {share:.1%} of turned digits read right")
    assert results["QLoRA, nf4 and adapters"] >= results["fine-tuned in full"] - 0.01


if __name__ == "__main__":
    main()
