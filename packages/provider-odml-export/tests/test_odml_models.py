"""Real models: calibrated or trained, exported, and as good in LiteRT as in JAX."""

import functools

import jax
import numpy as np
import pytest

import provider_odml as odml
from jaxtap_testkit.odml_models import MODELS, accuracy, load_digits, some_batches, train
from provider_odml_export.exporting import export as pipeline

pytestmark = pytest.mark.sample(1)

MODES = {
    "W8A8": {"weight_qtype": "int8", "output_qtype": "int8"},
    "W4A8": {"weight_qtype": "int4", "output_qtype": "int8"},
    "W8A16": {"weight_qtype": "int8", "output_qtype": "int16"},
    "dynamic": {"weight_qtype": "int8", "input_qtype": "int8"},
    "weight-only": {"weight_qtype": "int8"},
}
POINTS = {"W8A8": 0.02, "W4A8": 0.05, "W8A16": 0.01, "dynamic": 0.02, "weight-only": 0.01}
"""How much accuracy a mode may cost."""
COMPARED = (
    ("cnn", "W8A8"),
    ("cnn", "W4A8"),
    ("cnn", "weight-only"),
    ("attention", "W8A16"),
    ("attention", "dynamic"),
)
DIGITS = load_digits()


@functools.cache
def trained(name):
    """The variables of the float model."""
    return train(MODELS[name], DIGITS, epochs=8)


@functools.cache
def calibrated(name, mode):
    """The model with fake quantization, and its ranges in float: of PTQ."""
    quantized = odml.qat(MODELS[name].apply, [odml.OdmlRule(**MODES[mode])])
    return quantized, quantized.calibrate(trained(name), [(b,) for b in some_batches(DIGITS, 4)])


@functools.cache
def finetuned(name, mode):
    """Variables and ranges of QAT that begins with those of PTQ."""
    quantized, start = calibrated(name, mode)
    stats = start.with_state(start.state)
    variables = train(
        MODELS[name], DIGITS, epochs=2, rate=1e-3,
        variables=trained(name), quantized=quantized, stats=stats,
    )  # fmt: skip
    return variables, stats


def exported(name, mode, variables, stats):
    """Returns the artifact, the logits of JAX's replay of it, and those of LiteRT."""
    seen = []

    def kept(model, programs, timeout):
        seen.extend(programs)
        return verified(model, programs, timeout)

    verified = pipeline._verified
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_verified", kept)
        rules = [odml.OdmlRule(**MODES[mode])]
        art = odml.export(MODELS[name].apply, variables, stats, rules, DIGITS.test_images)
    (replayed,), _ = seen[0].replay()
    (logits,) = art.run(x=DIGITS.test_images).values()
    return art, replayed, logits


@functools.cache
def ptq(name, mode):
    return exported(name, mode, trained(name), calibrated(name, mode)[1])


def assert_same_classes(art, replayed, logits):
    """LiteRT's class is the best of JAX's, or one that is a single step of the output behind."""
    step = art.report.sites[-1].scale
    chosen = np.take_along_axis(replayed, logits.argmax(axis=-1)[:, None], axis=-1)[:, 0]
    np.testing.assert_array_less(replayed.max(axis=-1) - chosen, 1.01 * step)


def in_float(name):
    logits = jax.jit(MODELS[name].apply)(trained(name), DIGITS.test_images)
    return accuracy(logits, DIGITS.test_labels)


def fake_quantized(name, mode, variables, stats):
    """Logits of the model as it is trained."""
    quantized, _ = calibrated(name, mode)

    def run(variables, x):
        return quantized(variables, x, quant_stats=stats, update_quant_stats=False)

    return jax.jit(run)(variables, DIGITS.test_images)


# Equinox's pools are none that the converter knows.
INTEGER = ("cnn", "residual", "mobilenet", "plain")
"""The models without norms: they are integer throughout."""


@pytest.mark.parametrize("name", sorted(MODELS, key="plain".__ne__))  # the cheapest first
def test_every_model_is_as_good_in_litert(name):
    """Calibrated, exported (which compares every tensor), and run."""
    art, replayed, logits = ptq(name, "W8A8")
    assert_same_classes(art, replayed, logits)
    assert accuracy(logits, DIGITS.test_labels) >= in_float(name) - POINTS["W8A8"]
    assert max(site.lsb for site in art.report.sites) <= 1.01
    if name in INTEGER:
        assert art.report.float_ops == 0
        assert set(art.report.bytes_by_dtype) <= {"int8", "int32"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), COMPARED)
def test_ptq(name, mode):
    floats, least = in_float(name), in_float(name) - POINTS[mode]
    found = fake_quantized(name, mode, trained(name), calibrated(name, mode)[1])
    assert accuracy(found, DIGITS.test_labels) >= least
    _, replayed, logits = ptq(name, mode)
    ours = accuracy(logits, DIGITS.test_labels)
    assert ours >= least
    assert np.mean(logits.argmax(axis=-1) == replayed.argmax(axis=-1)) >= 0.99
    assert floats > 0.93  # it was trained at all


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [("cnn", "W4A8"), ("attention", "W4A8")])
def test_qat(name, mode):
    variables, stats = finetuned(name, mode)
    found = accuracy(fake_quantized(name, mode, variables, stats), DIGITS.test_labels)
    _, replayed, logits = exported(name, mode, variables, stats)
    assert found >= in_float(name) - 0.01
    assert accuracy(logits, DIGITS.test_labels) >= in_float(name) - 0.01
    assert np.mean(logits.argmax(axis=-1) == replayed.argmax(axis=-1)) >= 0.99
