"""Handwritten digits, and how small models of them are trained: ordinary JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 64


@dataclass(frozen=True)
class Digits:
    """1797 scans of handwritten digits; a quarter is for testing.

    Attributes:
        train_images: f32 [1347, *shape], in [0, 1].
        test_images: f32 [450, *shape], in [0, 1].
        train_labels: i32 [1347], 0 to 9.
        test_labels: i32 [450], 0 to 9.
    """

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray

    @classmethod
    def load(cls, seed: int = 0, shape: tuple[int, ...] = (8, 8)) -> Digits:
        """Read the digits, which are a part of scikit-learn.

        Args:
            seed: which images are for testing.
            shape: of one image: 64 pixels, such as ``(8, 8, 1)``.
        """
        pixels, targets = map(np.asarray, load_digits(return_X_y=True))
        images = (pixels / 16).astype(np.float32).reshape(-1, *shape)
        labels = targets.astype(np.int32)
        return cls(
            *train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
        )

    def batches(
        self, epochs: int = 1, seed: int = 0, advance: Callable[[], object] | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield batches of images and labels for training.

        Args:
            epochs: how often each image is seen.
            seed: of the order.
            advance: called after each epoch.
        """
        rng = np.random.default_rng(seed)
        for _ in range(epochs):
            order = rng.permutation(len(self.train_images))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                batch = order[start : start + BATCH]
                yield self.train_images[batch], self.train_labels[batch]
            if advance is not None:
                advance()


def train(
    apply: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    digits: Digits,
    *,
    epochs: int,
    rate: float,
    seed: int = 0,
    advance: Callable[[], object] | None = None,
) -> Any:
    """Train a model with Adam.

    Args:
        apply: parameters and images to logits, f32 [N, 10].
        epochs: how often each image is seen.
        rate: the learning rate.
        seed: of the order of the images.
        advance: called after each epoch.
    """
    optimizer = optax.adam(rate)
    state = optimizer.init(params)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state, images, labels):
        updates, state = optimizer.update(jax.grad(loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), state

    for images, labels in digits.batches(epochs, seed, advance):
        params, state = step(params, state, images, labels)
    return params
