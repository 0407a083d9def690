"""The stored form of transformed parameters."""

import jax.numpy as jnp
import numpy as np
import pytest

import interception_core as core
import provider_xla as xla
from jaxtap_testkit.split_form import declaring, quantized, split
from provider_xla.testing import StoredFormConformance
from provider_xla_passes import Rotated, Scaled


class TestTransformedWeight(StoredFormConformance):
    def make(self, w):
        rng = np.random.default_rng(3)
        by = jnp.asarray(rng.uniform(0.5, 2, 64), jnp.float32)
        steps = (Scaled(by), Rotated(jnp.asarray(rng.choice([-1, 1], 64), jnp.int8), 32))
        for step in steps:
            w = step.weight(w)
        return xla.TransformedWeight(quantized(w), steps, (-2,))


STEP = {"kind": "scaled"}
WRONG = {
    "a block": ({"steps": [STEP, {"kind": "rotated", "block": 3}]}, {}),
    "an axis": ({"k_axes": [-9]}, {}),
    "no axis": ({"k_axes": []}, {}),
    "an axis twice": ({"k_axes": [-2, -2]}, {}),
    "another size": ({}, {"step0": jnp.ones(32)}),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_parts_are_refused(case):
    about, arrays = WRONG[case]
    made = TestTransformedWeight()
    parts = made.make(made.weight()).to_parts()
    cls = core.get_form("transformed")
    cls.from_parts(parts.about, parts.arrays)
    with pytest.raises((ValueError, TypeError)):
        cls.from_parts({**parts.about, **about}, {**parts.arrays, **arrays})


@pytest.fixture
def plugin():
    with declaring("acme-split"):
        yield


def test_a_transformed_form_of_a_plugin(plugin, tmp_path):
    step = Rotated(jnp.ones(64, jnp.int8), 64)
    w = jnp.asarray(np.random.default_rng(0).normal(size=(64, 24)), jnp.float32)
    form = xla.TransformedWeight(split(step.weight(w)), (step,), (-2,))
    xla.save(tmp_path / "a.safetensors", {"w": form})
    again = xla.load(tmp_path / "a.safetensors")["w"]
    np.testing.assert_array_equal(again.restore(), form.restore())
    assert np.linalg.norm(again.restore() - w) < 0.02 * np.linalg.norm(w)
