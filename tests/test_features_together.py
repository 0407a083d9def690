"""What one feature of plans makes, in another: transformed weights, caches, reports, exports."""

import re
import traceback
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import provider_xla as xla
import quant_numerics as qn
from hijax_trace import Carrier
from interception_core.testing import installed_plugins
from jaxtap_testkit.bridge_nets import TOKENS, equinox_net, linen_net, nnx_net
from jaxtap_testkit.cached_decoders import DECODERS, B, keep, parameters
from provider_xla import PtqProvider, QuantizationError, QuantizationRule, SmoothQuant


@pytest.fixture(autouse=True)
def kernels():
    """No kernels, installed or not."""
    with installed_plugins(without={"te-ffi-kernels", "te-ffi-kernels-cuda13"}):
        yield


def rows(seed, *shape):
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def rounded(x, axes, top):
    """Quantized values and scales in float64: the largest magnitude along ``axes`` is ``top``."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axes, keepdims=True).astype(np.float32).astype(np.float64) / top
    return np.rint(x / scale) * scale


def check(error, expected, found, about=0.02):
    """A code at a tie may be the other one: then the ratio differs, by little."""
    sqnr = 10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())
    assert error.sqnr_db == pytest.approx(sqnr, abs=about)
    relative = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error.relative == pytest.approx(relative, rel=about)
    assert error.max_abs_error == pytest.approx(np.abs(found - expected).max(), rel=0.02)


def test_a_report_of_transformed_parameters():
    w, x = rows(0, 32, 8), rows(1, 16, 32)
    x *= np.geomspace(0.01, 1, 32, dtype=np.float32)  # some channels are much larger than others
    rule = QuantizationRule(weight_qtype="int4", act_qtype="int8")
    plan = PtqProvider(rule).plan(lambda w, x: x @ w, w, x)
    made = plan.optimize(w, [(x,)], [SmoothQuant()], prepack=False).params
    plain, smooth = (plan.report(w, x, stored=s, time=t) for s, t in [(None, False), (made, True)])
    by = np.float64(made.steps[0].by)
    expected = np.float64(x) @ np.float64(w)
    check(plain.ops[0].error, expected, rounded(x, 1, 127) @ rounded(w, 0, 7))
    found = rounded(x / by, 1, 127) @ rounded(np.float64(w) * by[:, None], 0, 7)
    check(smooth.ops[0].error, expected, found, about=0.1)
    check(smooth.outputs[0].error, expected, found, about=0.1)
    assert smooth.bytes_after > plain.bytes_after
    assert smooth.ops[0].seconds > 0
    with pytest.raises(QuantizationError, match="for plans of the trace engine"):
        PtqProvider(rule, engine="patch").plan(lambda w, x: x @ w, w, x).report(w, x, stored=made)


D = 32
PARAMS = {"v": rows(2, D, D) / 6, "w": rows(3, D, D) / 6, "mask": np.tri(D, dtype=np.float32)}
X = rows(4, 5, D) / 6


def model(params, x):
    masked = params["w"] * params["mask"]
    return jnp.tanh(x @ params["v"]) @ masked


@pytest.mark.slow
def test_derived_and_transformed_weights():
    rule = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    plan = xla.PtqProvider(rule).plan(model, PARAMS, X)
    found = plan.optimize(PARAMS, [(X,)], [xla.Hadamard()])
    kinds = {type(leaf) for leaf in jax.tree.leaves(found.params, is_leaf=is_stored)}
    assert {Carrier, xla.TransformedWeight} <= kinds
    wanted = jax.jit(plan.apply(model))(found.params, X)
    for inside in (False, True):
        program = plan.export(found.params, X, shapes="b, ...", inside=inside)
        again = xla.load_exported(program.serialize())
        assert str(again) == str(program)
        given = () if inside else (found.params,)
        np.testing.assert_allclose(again(*given, X), wanted, atol=1e-6)
        np.testing.assert_allclose(again(*given, X[:2]), wanted[:2], atol=1e-6)
    with pytest.raises(xla.StoreError, match="must be a tree like that of the program"):
        again.parameters(PARAMS)


def is_stored(node):
    return isinstance(node, Carrier | xla.TransformedWeight | qn.QArray)


@pytest.mark.slow
def test_a_step_with_a_quantized_cache():
    step, cache = DECODERS["carry"](keep)
    params, token = parameters(), jnp.arange(B)
    rules = [xla.CacheRule("cache"), xla.QuantizationRule(weight_qtype="int8")]
    plan = xla.PtqProvider(rules).plan(step, params, token, cache, 0)
    stored, held = plan.quantize(params), plan.quantize_cache(cache)
    run, again = (
        jax.jit(plan.apply(step)),
        xla.load_exported(plan.export(stored, token, held, 0).serialize()),
    )
    others = held
    for position in range(3):
        wanted, held = run(stored, token, held, position)
        found, others = again(stored, token, others, position)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert isinstance(others["k"], xla.CacheArray)
    jax.tree.map(np.testing.assert_array_equal, others, held)


def test_a_model_with_caches_is_no_program():
    nnx = pytest.importorskip("flax.nnx")
    attention = nnx.MultiHeadAttention(2, 8, 8, decode=True, rngs=nnx.Rngs(0), keep_rngs=False)
    attention.init_cache((1, 4, 8))
    x = jnp.ones((1, 1, 8))
    rules = [xla.CacheRule("cache"), xla.QuantizationRule(weight_qtype="int8", weights_only=True)]
    made = xla.quantize_model(attention, xla.PtqProvider(rules), x)
    with pytest.raises(xla.QuantizationError, match="must hold no caches to be exported"):
        xla.export_model(made, x)


def models():
    net, variables = linen_net()
    return {
        "nnx": (nnx_net(), TOKENS),
        "linen": (net.bind(variables), TOKENS),
        "equinox": (equinox_net(), TOKENS[0]),
    }


def trained(model):
    """Return a model whose adapters are not those that change nothing."""
    if isinstance(model, nnx.Module):
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.LoRAParam):
                variable[...] += 0.25
        return model
    if isinstance(model, linen.Module):
        module, variables = model.unbind()
        return module.bind({**variables, "lora": jax.tree.map(raised, variables["lora"])})
    adapters, rest = eqx.partition(model, xla.adapter_mask(model))
    return eqx.combine(jax.tree.map(raised, adapters), rest)


def raised(x):
    return x + 0.25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nnx", "linen", "equinox"])
def test_exported_models_with_adapters(tmp_path, name):
    """Their parameters are loaded without a plan, too: then an adapter is a dict of arrays."""
    model, x = models()[name]
    path = ".*(up|down|mlp).*"
    rule = xla.LoraRule(module_path=path, weight_qtype="int8", weights_only=True, rank=2, alpha=4.0)
    made = xla.quantize_model(model, PtqProvider(rule), x)
    untrained = np.asarray(made(x))
    made = trained(made)
    stored = xla.model_parameters(made)
    assert sum(isinstance(leaf, xla.AdaptedWeight) for leaf in stored.values()) == 4
    xla.save(tmp_path / "a.safetensors", stored)
    y = np.asarray(made(x))
    assert np.abs(y - untrained).max() > 1e-2
    xla.export_model(made, x).save(tmp_path / "program")
    program = xla.load_exported(tmp_path / "program")
    loaded = program.parameters(xla.load(tmp_path / "a.safetensors"))
    np.testing.assert_allclose(program(loaded, x), y, atol=1e-5)
    inside = xla.load_exported(xla.export_model(made, x, inside=True).serialize())
    np.testing.assert_allclose(inside(x), y, atol=1e-5)


def test_exported_weights_with_minima():
    """As GGUF files have them."""
    w, x = rows(0, 64, 32), rows(1, 3, 64)
    q = qn.quantize(w, "int4", channel_axes=(1,), tile_axes={0: 8})
    held = xla.AffineWeight(q, 0.1 * jnp.ones((8, 32)), 8)
    fn = lambda w, x: x @ w  # noqa: E731
    plan = PtqProvider("int4").plan(fn, w, x)
    program = xla.load_exported(plan.export(held, x).serialize())
    np.testing.assert_array_equal(program(held, x), jax.jit(plan.apply(fn))(held, x))


def test_errors_of_a_program_show_no_frames_of_features():
    """Those between the program and JAX, where features call it."""

    def fails(w, x, cache):
        if x.shape[0] != 3:
            raise ZeroDivisionError
        return jnp.einsum("bd,btd->bt", x @ w, cache), cache.at[:, 0].set(x)

    w, three, cache = jnp.ones((16, 16)), jnp.ones((3, 16)), jnp.ones((3, 4, 16))
    rules = [xla.CacheRule("cache"), QuantizationRule(weight_qtype="int8")]
    plan = PtqProvider(rules).plan(fails, w, three, cache)
    stored = plan.quantize(w)
    for call in (plan.apply(), jax.jit(plan.apply())):
        with pytest.raises(ZeroDivisionError) as caught:
            call(stored, three[:2], cache)
        files = [one.filename for one in traceback.extract_tb(caught.value.__traceback__)]
        assert files[-1] == __file__
        assert not [file for file in files if "provider_xla" in file], files


def test_the_page_has_every_name_that_features_use():
    import provider_xla.cli
    import provider_xla.features

    page = (Path(__file__).parents[1] / "docs" / "features.md").read_text()
    names = {*provider_xla.features.__all__, *provider_xla.cli.__all__}
    assert not [name for name in sorted(names) if not re.search(rf"`{name}\b", page)]
