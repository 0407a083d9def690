"""Quantized training learns as well as float: two models on handwritten digits."""

import dataclasses

import jax
import numpy as np
import pytest

from interception_core.demo_kit import Digits
from jaxtap.demo import MODELS, train
from provider_xla import QtProvider, QtRule

SEED = 0
RULES = [
    (QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"), 0.01),
    (QtRule(weight_qtype="int4", act_qtype="int8"), 0.02),
]


@pytest.fixture(scope="module")
def digits():
    return Digits.load(SEED)


def accuracy(model, digits):
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        params = train(model, digits, SEED, lambda: None)
    found = np.asarray(jax.jit(model.apply)(params, digits.test_images)).argmax(axis=-1)
    return np.mean(found == digits.test_labels)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rule"), [*zip(MODELS, RULES, strict=True)])
def test_converges(model, rule, digits):
    rule, points = rule
    quantized = dataclasses.replace(model, apply=QtProvider([rule]).apply(model.apply))
    assert accuracy(quantized, digits) >= accuracy(model, digits) - points
