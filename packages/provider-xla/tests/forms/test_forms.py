"""Stored forms: ours, and one that a plugin brings."""

import dataclasses
import sys
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import interception_core as core
import provider_xla as xla
import quant_numerics as qn
from hijax_trace import Part
from interception_core.testing import installed_plugins
from jaxtap_testkit.programs import as_program
from provider_xla.forms.transformed import Rotated, Scaled
from provider_xla.program.sites import Sites
from provider_xla.testing import StoredFormConformance


@as_program
def quantized(w, qtype="int8"):
    return qn.quantize(w, qtype, channel_axes=(1,))


class TestQArray(StoredFormConformance):
    def make(self, w):
        return quantized(w)


class TestPackedQArray(StoredFormConformance):
    def make(self, w):
        return PACK(quantized(w, "int6"))


PACK = jax.jit(qn.pack)


class TestAffineWeight(StoredFormConformance):
    tolerance = 0.1

    @staticmethod
    @jax.jit
    def make(w):
        low, high = (
            x.reshape(4, 1, 24) for x in (w.reshape(4, 16, 24).min(1), w.reshape(4, 16, 24).max(1))
        )
        scale = (high - low) / 15
        values = jnp.round((w.reshape(4, 16, 24) - low) / scale) - 8
        q = qn.qarray(
            values.reshape(64, 24).astype(jnp.int4), scale.reshape(4, 24), "int4", jnp.float32
        )
        return xla.AffineWeight(q, low.reshape(4, 24), 8)


class TestTransformedWeight(StoredFormConformance):
    @staticmethod
    @jax.jit
    def make(w):
        rng = np.random.default_rng(3)
        by = jnp.asarray(rng.uniform(0.5, 2, 64), jnp.float32)
        steps = (Scaled(by), Rotated(jnp.asarray(rng.choice([-1, 1], 64), jnp.int8), 32))
        for step in steps:
            w = step.weight(w)
        return xla.TransformedWeight(quantized(w), steps, (-2,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Split(qn.StoredForm):
    """Two int4 arrays whose sum is the array: what the first lacks is rounded a second time."""

    kind: ClassVar[str] = "acme-split"
    qtype: ClassVar[str] = "int4"

    coarse: qn.QArray
    fine: qn.QArray

    @property
    def shape(self):
        return self.coarse.shape

    @property
    def dtype(self):
        return self.coarse.dtype

    @property
    def nbytes(self):
        return self.coarse.nbytes + self.fine.nbytes

    @property
    def scale_shape(self):
        return self.coarse.scale_shape

    def restore(self):
        return self.coarse.restore() + self.fine.restore()

    def parts(self):
        return {"coarse": Part(self.coarse), "fine": Part(self.fine)}

    def reduced(self, contraction, side, x, extras):
        operands = (self.fine, x) if side == 0 else (x, self.fine)
        return self.coarse, x, contraction.run(*operands, *extras)

    def arrays(self):
        parts = {"coarse": self.coarse.arrays(), "fine": self.fine.arrays()}
        return {f"{of}.{name}": x for of, held in parts.items() for name, x in held.items()}

    def to_parts(self, scale_shape=None):
        about = {"shape": list(self.shape), "dtype": self.dtype.name, "qtype": self.qtype}
        return qn.Parts(self.kind, about, self.arrays())

    @classmethod
    def from_parts(cls, about, arrays):
        def one(name):
            held = {
                part.partition(".")[2]: x for part, x in arrays.items() if part.startswith(name)
            }
            return qn.QArray.from_parts(about, held)

        return cls(one("coarse"), one("fine"))


qn.register_serialization(Split)


@jax.jit
def split(w):
    coarse = quantized(w, "int4")
    return Split(coarse, quantized(w - coarse.restore(), "int4"))


@pytest.fixture
def declared(monkeypatch):
    """A function that declares the form of this file under a name, in a plugin."""

    def declare(name):
        module = types.ModuleType("acme_split_plugin")
        module.API, module.Split = (1, 7), Split
        spec = core.FormSpec(name, "two int4 arrays", "acme_split_plugin:Split")
        module.jaxtap_register_forms = core.hookimpl(lambda: [spec])
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return installed_plugins(module.__name__)

    return declare


@pytest.fixture
def plugin(declared):
    with declared("acme-split"):
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


def test_a_spec_of_another_class(declared):
    with declared("acme-other"):
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


STEP = {"kind": "scaled"}
WRONG = {
    "a block": ("transformed", {"steps": [STEP, {"kind": "rotated", "block": 3}]}, {}),
    "an axis": ("transformed", {"k_axes": [-9]}, {}),
    "no axis": ("transformed", {"k_axes": []}, {}),
    "an axis twice": ("transformed", {"k_axes": [-2, -2]}, {}),
    "another size": ("transformed", {}, {"step0": jnp.ones(32)}),
    "no shift": ("affine", {"shift": None}, {}),
    "a large shift": ("affine", {"shift": 10**30}, {}),
    "minima of another shape": ("affine", {}, {"minimum": jnp.ones((3, 7))}),
    "minima of fewer axes": ("affine", {}, {"minimum": jnp.ones(4)}),
    "integer minima": ("affine", {}, {"minimum": jnp.ones((4, 24), jnp.int32)}),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_parts_are_refused(case):
    kind, about, arrays = WRONG[case]
    made = {"transformed": TestTransformedWeight, "affine": TestAffineWeight}[kind]()
    parts = made.make(made.weight()).to_parts()
    cls = core.get_form(kind)
    cls.from_parts(parts.about, parts.arrays)
    with pytest.raises((ValueError, TypeError)):
        cls.from_parts({**parts.about, **about}, {**parts.arrays, **arrays})


def test_a_transformed_form_of_a_plugin(plugin, tmp_path):
    step = Rotated(jnp.ones(64, jnp.int8), 64)
    w = jnp.asarray(np.random.default_rng(0).normal(size=(64, 24)), jnp.float32)
    form = xla.TransformedWeight(split(step.weight(w)), (step,), (-2,))
    xla.save(tmp_path / "a.safetensors", {"w": form})
    again = xla.load(tmp_path / "a.safetensors")["w"]
    np.testing.assert_array_equal(again.restore(), form.restore())
    assert np.linalg.norm(again.restore() - w) < 0.02 * np.linalg.norm(w)


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
