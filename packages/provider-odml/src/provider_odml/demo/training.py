"""Data and training, both ordinary JAX: the train step is the same in float and with QAT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from .model import Params

BATCH = 64
EPOCHS = {"float": 10, "QAT": 4}
_RATES = {"float": 3e-3, "QAT": 5e-4}


@dataclass(frozen=True)
class Digits:
    """1797 scans of handwritten digits, 8x8x1 pixels, in [0, 1]; a quarter is for testing."""

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Reads them from inside scikit-learn."""
        pixels, targets = map(np.asarray, load_digits(return_X_y=True))
        images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
        labels = targets.astype(np.int32)
        split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
        return cls(*split)


def train(
    apply: Callable[[Params, jax.Array], jax.Array],
    params: Params,
    digits: Digits,
    kind: str,
    seed: int,
    advance: Callable[[], object],
) -> Params:
    """Trains with Adam, and calls ``advance`` after each epoch.

    Args:
        apply: parameters and images to logits. Where it is fake quantized, its statistics
            change in place.
        params: what to begin with.
        digits: the data.
        kind: "float" or "QAT": how long, and how fast.
        seed: of the order of the images.
        advance: called after each epoch.

    Returns:
        The new parameters.
    """
    optimizer = optax.adam(_RATES[kind])
    state = optimizer.init(params)

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state, images, labels):
        updates, state = optimizer.update(jax.grad(loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(seed)
    for _ in range(EPOCHS[kind]):
        order = rng.permutation(len(digits.train_images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            params, state = step(
                params, state, digits.train_images[batch], digits.train_labels[batch]
            )
        advance()
    return params
