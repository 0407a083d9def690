"""Adapters beside 4-bit parameters learn a new task as well as full fine-tuning does."""

import jax
import numpy as np
import optax
import pytest

from interception_core.demo_kit import BATCH, Digits
from jaxtap.demo import MODELS
from provider_xla import LoraRule, PtqProvider

MODEL = MODELS[1]  # attention
EPOCHS, SEED = 8, 0


def fine_tuned(apply, params, images, labels, learning_rate):
    optimizer = optax.adam(
        optax.cosine_decay_schedule(learning_rate, EPOCHS * (len(images) // BATCH))
    )
    state = optimizer.init(params)

    def loss(params, images, labels, key):
        logits = apply(params, images, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state, images, labels, key):
        updates, state = optimizer.update(jax.grad(loss)(params, images, labels, key), state)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(SEED)
    for epoch in range(EPOCHS):
        order = rng.permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            key = jax.random.key(epoch * len(images) + start)
            params, state = step(params, state, images[batch], labels[batch], key)
    return params


@pytest.fixture(scope="module")
def digits():
    return Digits.load(SEED)


@pytest.fixture(scope="module")
def base(digits):
    params = MODEL.init(jax.random.key(SEED))
    images, labels = digits.train_images, digits.train_labels
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        return fine_tuned(lambda p, x, key: MODEL.apply(p, x), params, images, labels, 3e-3)


def accuracy(apply, digits):
    found = np.asarray(jax.jit(apply)(turned(digits.test_images))).argmax(axis=-1)
    return np.mean(found == digits.test_labels)


def turned(images):
    return np.rot90(images, axes=(1, 2)).copy()


@pytest.fixture(scope="module")
def in_full(digits, base):
    assert accuracy(lambda x: MODEL.apply(base, x), digits) < 0.3  # it is another task
    images, labels = turned(digits.train_images), digits.train_labels
    with jax.numpy_dtype_promotion("standard"):
        params = fine_tuned(lambda p, x, key: MODEL.apply(p, x), base, images, labels, 3e-3)
    return accuracy(lambda x: MODEL.apply(params, x), digits)


@pytest.mark.slow
def test_learns_as_well_as_in_full(digits, base, in_full):
    rule = LoraRule(weight_qtype="nf4", rank=8, alpha=16, dropout=0.02)
    plan = PtqProvider(rule).plan(MODEL.apply, base, digits.train_images[:BATCH])
    stored, run = plan.quantize(base), plan.apply(MODEL.apply)
    images, labels = turned(digits.train_images), digits.train_labels
    with jax.numpy_dtype_promotion("standard"):
        adapters = fine_tuned(
            lambda adapters, x, key: run(stored, x, adapters=adapters, dropout_key=key),
            plan.init_adapters(jax.random.key(1)),
            images,
            labels,
            1e-2,
        )
    found = accuracy(lambda x: run(stored, x, adapters=adapters), digits)
    assert found > 0.9
    assert found >= in_full - 0.01
    merged = plan.merge(stored, adapters)
    assert abs(accuracy(lambda x: MODEL.apply(merged, x), digits) - found) <= 0.005
