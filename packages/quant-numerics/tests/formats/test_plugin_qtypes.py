"""Formats that a plugin declares, from a module made on the spot."""

import dataclasses
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import interception_core as core
import quant_numerics as qn
from interception_core.testing import installed_plugins
from jaxtap_testkit.programs import as_program
from quant_numerics.formats.qtypes import formats

# Not for a name that means another format in each test.
dequantize, pack, quantize, take = map(as_program, (qn.dequantize, qn.pack, qn.quantize, qn.take))
BOOK = (-2.0, -1.0, 0.0, 0.5, 3.0)


def ternary():
    return qn.QType("tern", "int", 2, 1, jnp.int2)


def halves():
    return qn.QType("halves", "codebook", 3, 3.0, jnp.uint4, block=8, codebook=BOOK)


def scaled_twice():
    return qn.QType("twice", "int", 4, 7, jnp.int8, 16, jnp.float8_e4m3fn)


@pytest.fixture
def plugin(monkeypatch):
    """Makes a plugin module that declares formats, as name to factory."""

    def make(name="acme", api=(1, 4), **factories):
        module = types.ModuleType(f"{name}_formats_plugin")
        module.API = api
        for key, factory in factories.items():
            setattr(module, key, factory)
        specs = [core.QTypeSpec(key, "a format", f"{module.__name__}:{key}") for key in factories]
        module.jaxtap_register_qtypes = core.hookimpl(lambda: specs)
        # hookimpl's function has to carry the hook's name.
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module.__name__

    return make


def test_a_ternary_format_multiplies_in_integers(plugin, primitives):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 40)).astype("f"), rng.normal(size=(40, 8)).astype("f")
    dims = (((1,), (0,)), ((), ()))
    with installed_plugins(plugin(tern=ternary)):
        qx, qw = qn.quantize_for_dot(x, (1,), "int8"), qn.quantize_for_dot(w, (0,), "tern")
        assert set(np.unique(np.asarray(qw.qvalue.astype(jnp.int8)))) == {-1, 0, 1}
        scale = np.abs(w.astype("d")).max(0)
        values = np.round(w / scale)
        expected = np.asarray(qn.dequantize(qx)).astype("d") @ (values * scale)
        np.testing.assert_allclose(qn.dot_general(qx, qw, dims), expected, rtol=1e-5, atol=1e-5)
        dots = [p for p in primitives(lambda a: qn.dot_general(a, qw, dims), qx) if "dot" in p[0]]
        assert dots == [("dot_general", ["int8", "int8"], ["int32"])]


def test_a_codebook_with_blocks_packs_and_moves(plugin):
    x = np.random.default_rng(1).normal(size=(6, 24)).astype("f")
    with installed_plugins(plugin(halves=halves)):
        q = quantize(x, "halves", channel_axes=(0,), tile_axes={1: 8})
        scale = np.abs(x.reshape(6, 3, 8)).max(-1, keepdims=True) / np.float32(3)
        ratio = np.clip(x.reshape(6, 3, 8) / scale, -3, 3)
        index = np.abs(ratio[..., None] - np.asarray(BOOK)).argmin(-1)
        expected = (np.asarray(BOOK)[index] * scale).reshape(x.shape)
        np.testing.assert_allclose(dequantize(q), expected, rtol=1e-6)
        packed = pack(q)
        assert packed.planes.shape == (6, 3, 3)
        np.testing.assert_allclose(dequantize(packed), expected, rtol=1e-6)
        np.testing.assert_allclose(dequantize(q.T[8:16]), expected.T[8:16], rtol=1e-6)
        rows = take(packed, jnp.array([4, 0]))
        np.testing.assert_allclose(rows, expected[[4, 0]], rtol=1e-6)
        with pytest.raises(ValueError, match=r"tiles of qtype .* must be of 8 elements"):
            qn.quantize(x, "halves", channel_axes=(0,))


def test_scales_of_scales_survive_packing(plugin):
    x = np.random.default_rng(2).normal(size=(4, 32)).astype("f")
    with installed_plugins(plugin(twice=scaled_twice)):
        q = quantize(x, "twice", channel_axes=(0,), tile_axes={1: 16})
        assert q.global_scale is not None
        np.testing.assert_allclose(dequantize(q), x, atol=np.abs(x).max() / 12)
        np.testing.assert_array_equal(dequantize(pack(q)), dequantize(q))
        taken = take(pack(q), jnp.array([3, 1]))
        np.testing.assert_array_equal(taken, np.asarray(dequantize(q))[[3, 1]])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_scales_may_be_of_16_bits(plugin, dtype):
    x = np.random.default_rng(3).normal(size=(4, 32)).astype("f")
    x[1] = 0

    def short():
        return dataclasses.replace(qn.get_qtype("int8"), name="short", scale_dtype=dtype)

    with installed_plugins(plugin(short=short)):
        q = qn.quantize(x, "short", channel_axes=(0,))
        assert q.scale.dtype == dtype
        scale = np.asarray(q.scale.astype(jnp.float32)).astype("d")
        exact = np.abs(x).max(1, keepdims=True) / 127
        assert np.abs(scale - exact)[[0, 2, 3]].max() <= np.abs(exact).max() / 2**8
        expected = np.clip(np.round(x / scale), -127, 127) * scale
        np.testing.assert_allclose(qn.dequantize(q), expected, rtol=1e-6)
        asymmetric = qn.quantize(x, "short", channel_axes=(0,), method="minmax")
        assert np.abs(np.asarray(qn.dequantize(asymmetric)) - x).max() < 0.03


def test_two_plugins_of_one_name_are_told(plugin):
    with (
        installed_plugins(plugin("acme", tern=ternary), plugin("rival", tern=ternary)),
        pytest.warns(core.PluginWarning, match="claimed by"),
        pytest.raises(core.PluginError, match=r"claimed by one .* got 'tern', .*JAXTAP_DISABLE"),
    ):
        qn.get_qtype("tern")


def test_a_format_that_hides_behind_ours_is_told_by_the_doctor(plugin):
    with installed_plugins(plugin(int8=ternary)):
        assert qn.get_qtype("int8") is qn.QTYPES["int8"]
        (_, hidden) = formats()
    assert (hidden.status, "hidden by quant-numerics' own" in hidden.message) == ("fail", True)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: qn.QTYPES["int8"], "must return a format called 'mine', got 'int8'"),
        (lambda: 8, "lacks: the name of the format"),
        (
            lambda: types.SimpleNamespace(name="mine", storage_dtype=1, scale_dtype=1),
            "must be a quant_numerics.QType",
        ),
    ],
)
def test_what_a_factory_must_return(plugin, factory, message):
    with installed_plugins(plugin(mine=factory)):
        with pytest.raises(core.PluginError, match=message):
            qn.get_qtype("mine")
        assert [found.status for found in formats()] == ["ok", "fail"]


def test_a_newer_plugin_is_told(plugin):
    with (
        installed_plugins(plugin(api=(1, 99), tern=ternary)),
        pytest.warns(core.PluginWarning, match="Upgrade interception-core"),
        pytest.raises(ValueError, match=r"a qtype must be .* got 'tern'") as caught,
    ):
        qn.get_qtype("tern")
    assert "Upgrade interception-core" in str(caught.value.__cause__)


def test_an_unknown_name_lists_those_of_plugins(plugin):
    with (
        installed_plugins(plugin(tern=ternary)),
        pytest.raises(ValueError, match=r"nvfp4, tern, .*Did you mean 'tern'.*jaxtap_register"),
    ):
        qn.get_qtype("terns")


GOOD = {"name": "x", "kind": "int", "bits": 4, "qmax": 7, "storage_dtype": jnp.int8}
BOOKED = {
    "name": "x",
    "kind": "codebook",
    "bits": 2,
    "qmax": 1.0,
    "storage_dtype": jnp.uint4,
    "codebook": (-1, 0, 1),
}


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (GOOD, "kind", "fixed"),
        (GOOD, "storage_dtype", jnp.uint8),
        (GOOD, "bits", 9),
        (GOOD, "qmax", 128),
        (GOOD, "qmax", 0),
        (GOOD, "codebook", (0.0, 1.0)),
        (GOOD, "block", 0),
        (GOOD, "scale_dtype", jnp.int32),
        (GOOD, "asymmetric", (-200, 3)),
        (BOOKED, "storage_dtype", jnp.int8),
        (BOOKED, "codebook", None),
        (BOOKED, "codebook", (0.5, 1)),
        (BOOKED, "codebook", (0, -1, 1)),
        (BOOKED, "codebook", (-1, 0, 0.25, 0.5, 1)),
        (BOOKED, "qmax", 2.0),
        (BOOKED, "asymmetric", (0, 3)),
    ],
)
def test_a_format_checks_its_parts(base, field, value):
    qn.QType(**base)
    with pytest.raises(ValueError, match=rf"QType.{field} must be .* in the format 'x'"):
        qn.QType(**{**base, field: value})
