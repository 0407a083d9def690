"""Data and training, both ordinary JAX: the models don't know that they will be quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from .models import Model, Params

BATCH, EPOCHS, LEARNING_RATE = 64, 15, 3e-3


@dataclass(frozen=True)
class Digits:
    """1797 scans of handwritten digits, 8x8 pixels, in [0, 1]; a quarter is for testing."""

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Reads them from inside scikit-learn."""
        pixels, targets = map(np.asarray, load_digits(return_X_y=True))
        images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
        labels = targets.astype(np.int32)
        split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
        return cls(*split)


def train(model: Model, digits: Digits, seed: int, advance: Callable[[], object]) -> Params:
    """Trains from scratch with Adam; calls ``advance`` after each epoch."""
    params = model.init(jax.random.key(seed))
    optimizer = optax.adam(LEARNING_RATE)
    state = optimizer.init(params)

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state, images, labels):
        updates, state = optimizer.update(jax.grad(loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        order = rng.permutation(len(digits.train_images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            params, state = step(
                params, state, digits.train_images[batch], digits.train_labels[batch]
            )
        advance()
    return params
