"""Stored forms: ours, and one that a plugin brings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import interception_core as core
import provider_xla as xla
import quant_numerics as qn
from interception_core.testing import installed_plugins
from jaxtap_testkit.split_form import Split, declaring, quantized, split
from provider_xla.program.sites import Sites
from provider_xla.testing import StoredFormConformance


class TestQArray(StoredFormConformance):
    def make(self, w):
        return quantized(w)


class TestPackedQArray(StoredFormConformance):
    def make(self, w):
        return PACK(quantized(w, "int6"))


PACK = jax.jit(qn.pack)


@pytest.fixture
def plugin():
    with declaring("acme-split"):
        yield


@pytest.mark.usefixtures("plugin")
class TestOfAPlugin(StoredFormConformance):
    tolerance = 0.02

    def make(self, w):
        return split(w)


def test_a_file_with_a_form_of_a_plugin_that_is_not_here(plugin, tmp_path):
    path = tmp_path / "a.safetensors"
    xla.save(path, {"w": split(jnp.ones((64, 24)))})
    assert "acme-split" in str(xla.read_manifest(path).params)
    with installed_plugins(), pytest.raises(xla.StoreError, match=r"got 'acme-split'.*Install"):
        xla.load(path)


def test_a_spec_of_another_class():
    with declaring("acme-other"):
        with pytest.raises(core.PluginError, match="of kind 'acme-other', got"):
            core.get_form("acme-other")
        with pytest.raises(core.UnknownNameError):
            core.get_form("acme-split")


def test_a_form_without_parts_can_not_be_saved(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True, eq=False)
    class Unwritten(Split):
        def to_parts(self, scale_shape=None):
            return qn.StoredForm.to_parts(self, scale_shape)

    form = split(jnp.ones((64, 24)))
    with pytest.raises(xla.StoreError, match="w is a Unwritten that can't be saved"):
        xla.save(tmp_path / "a.safetensors", {"w": Unwritten(form.coarse, form.fine)})


def test_a_form_is_contracted_without_being_restored():
    w, x = jnp.ones((64, 24)), jnp.ones((5, 64))
    plan = xla.PtqProvider("int8").plan(lambda w, x: x @ w, w, x)
    run = jax.jit(plan.apply())
    np.testing.assert_allclose(run(split(w), x), 64, rtol=1e-5)
    # One for each half: the restored array would take one.
    assert run.lower(split(w), x).as_text().count("stablehlo.dot_general") == 2


def test_a_form_with_a_kernel_of_its_own_is_not_unpacked_for_it():
    asked = []

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True, eq=False)
    class Own(Split):
        reduced = qn.StoredForm.reduced

        def unpacked(self):
            return self.coarse

        def contract(self, contraction, side, x, *, how, calibration, extras, added):
            asked.append((side, how))
            return NotImplemented if x.shape[0] == 1 else added.to(x @ self.restore())

    w, x = jnp.linspace(-1, 1, 64 * 24).reshape(64, 24), jnp.ones((5, 64))
    form = Own(split(w).coarse, split(w).fine)
    plan = xla.PtqProvider(xla.Rule(weight="int8")).plan(lambda w, x: x @ w, w, x)
    y = jax.jit(plan.apply())(form, x)
    np.testing.assert_allclose(y, x @ form.restore(), rtol=1e-5, atol=1e-5)
    assert asked == [(1, None)]
    # What its kernel leaves is computed by what `unpacked` returns.
    rest = jax.jit(plan.apply())(form, x[:1])
    np.testing.assert_allclose(rest, x[:1] @ form.coarse.restore(), rtol=1e-5, atol=1e-5)
    assert len(asked) == 2


@pytest.mark.parametrize("qtype", ["int8", "int6"])
def test_equal_layers_are_asked_about_once(monkeypatch, qtype):
    """An answer that needs the id of its operation would be asked for in each layer."""
    asked = []
    handle = Sites._handle

    def counting(self, op, call, *args, **kwargs):
        asked.append(op.name)
        return handle(self, op, call, *args, **kwargs)

    def model(p, x):
        for w in p:
            x = jax.nn.relu(x @ w)
        return x

    p, x = [jnp.ones((32, 32))] * 12, jnp.ones((4, 32))
    plan = xla.PtqProvider(qtype_rule(qtype)).plan(model, p, x)
    stored = plan.quantize(p)
    monkeypatch.setattr(Sites, "_handle", counting)
    jax.jit(plan.apply()).trace(stored, x)
    assert 0 < len(asked) < 12


def qtype_rule(qtype):
    return xla.QuantizationRule(weight_qtype=qtype, act_qtype="int8")
