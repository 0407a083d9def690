"""How the two models are trained."""

from __future__ import annotations

from collections.abc import Callable

import jax

from interception_core import demo_kit

from .models import Model, Params

EPOCHS, LEARNING_RATE = 15, 3e-3


def train(
    model: Model,
    digits: demo_kit.Digits,
    seed: int = 0,
    advance: Callable[[], object] | None = None,
) -> Params:
    """Train a model from scratch."""
    params = model.init(jax.random.key(seed))
    return demo_kit.train(
        model.apply, params, digits, epochs=EPOCHS, rate=LEARNING_RATE, seed=seed, advance=advance
    )
