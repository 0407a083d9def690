"""Models for LiteRT: calibrated on the same batches by both libraries, and run by LiteRT."""

import functools

import jax
import numpy as np
import pytest
from odml_peer import MODES, QwixModel, our_rule

import provider_odml as odml
from jaxtap_testkit.odml_models import (
    MODELS,
    Attention,
    Cnn,
    accuracy,
    load_digits,
    some_batches,
    train,
)  # isort: skip

MODULES = {"cnn": Cnn(), "attention": Attention()}
QWIX_CANT_CALIBRATE = {"W8A16"}
"""Qwix's default, minmax, "doesn't support asymmetric quantization" of int16."""
QWIX_CANT_CONVERT = {"W4A8", "W8A16"}
"""Qwix's conversion knows int8 alone."""
LITERT_CANT_RUN = {("attention", "dynamic")}
"""Qwix's file: LiteRT's XNNPACK refuses it."""
DIGITS = load_digits()


@functools.cache
def trained(name):
    """The float model's variables, and its logits."""
    variables = train(MODELS[name], DIGITS, epochs=8)
    return variables, np.asarray(jax.jit(MODELS[name].apply)(variables, DIGITS.test_images))


def ours(name, mode):
    """Returns our logits: fake quantized, and LiteRT's."""
    variables, _ = trained(name)
    rules, fn, x = [our_rule(mode)], MODELS[name].apply, DIGITS.test_images
    quantized = odml.qat(fn, rules)
    stats = quantized.calibrate(variables, [(batch,) for batch in some_batches(DIGITS, 4)])

    def run(variables, x):
        return quantized(variables, x, quant_stats=stats, update_quant_stats=False)

    (logits,) = odml.export(fn, variables, stats, rules, x).run(x=x).values()
    return np.asarray(jax.jit(run)(variables, x)), logits


def qwixs(name, mode):
    """Returns Qwix's logits; None where it, or LiteRT, can't."""
    variables, _ = trained(name)
    if mode in QWIX_CANT_CALIBRATE:
        return None, None
    model = QwixModel(MODULES[name], mode)
    state = model.calibrate(variables, some_batches(DIGITS, 4))
    fake = model.logits(variables, state, DIGITS.test_images)
    if mode in QWIX_CANT_CONVERT or (name, mode) in LITERT_CANT_RUN:
        return fake, None
    return fake, model.litert(variables, state, DIGITS.test_images)


def sqnr(exact, found):
    return 10 * np.log10(np.sum(exact**2) / np.sum((found - exact) ** 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODULES)
def test_accuracy_of_ptq(name, mode):
    """No worse than Qwix by more than chance: two of 450 images, 3 dB of noise."""
    _, exact = trained(name)
    for what, our, their in zip(
        ("JAX", "LiteRT"), ours(name, mode), qwixs(name, mode), strict=True
    ):
        right = accuracy(our, DIGITS.test_labels)
        print(f"{name} {mode} {what}: ours {right:.4f}, {sqnr(exact, our):.1f} dB", end="")
        if their is None:
            print("; Qwix can't")
            continue
        theirs = accuracy(their, DIGITS.test_labels)
        print(f"; Qwix {theirs:.4f}, {sqnr(exact, their):.1f} dB")
        assert right >= theirs - 2.5 / len(DIGITS.test_labels)
        assert sqnr(exact, our) >= sqnr(exact, their) - 3
