"""``import jaxtap as jt``: its names, and what they do."""

import ast
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtap as jt
import provider_xla as xla
from jaxtap_testkit.processes import run_python


def test_nothing_is_imported_before_it_is_used():
    run_python("-c", "import sys, jaxtap as jt; dir(jt); assert 'jax' not in sys.modules")


@pytest.mark.parametrize("name", jt.__all__)
def test_a_name_is_there_once(name):
    found = getattr(jt, name)
    assert found is getattr(jt, name)
    assert name in dir(jt)
    if name in jt._XLA:
        assert found is getattr(xla, name)


def test_type_checkers_know_the_names():
    stub = ast.parse(Path(jt.__file__).with_suffix(".pyi").read_text())
    found = [a.asname for s in stub.body if isinstance(s, ast.ImportFrom) for a in s.names]
    assert sorted(found) == jt.__all__


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [
        ("Rule", "provider_xla", r"provider-xla.*jaxtap\[xla\]"),
        ("plan", "provider_xla", r"jaxtap\[xla\]"),
        ("passes", "provider_xla", r"jaxtap.passes needs.*jaxtap\[xla\]"),
        ("llm", "jaxtap_llm", r"jaxtap.llm needs jaxtap-llm.*jaxtap\[llm\]"),
        ("odml", "provider_odml", r"jaxtap.odml needs provider-odml.*jaxtap\[odml\]"),
        ("optim", "quant_optim", r"jaxtap.optim needs quant-optim.*jaxtap\[optim\]"),
    ],
)
def test_what_is_missing_says_what_to_install(monkeypatch, name, package, install):
    modules = ("programs", "passes", "odml", "optim", "llm")
    for module in (f"jaxtap.{one}" for one in modules):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delitem(vars(jt), name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=install):
        getattr(jt, name)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = jt.quantise


def mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def inputs():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(32, 64)) / 6, "down": rng.normal(size=(64, 16)) / 8}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return params, jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)


def near(found, expected, most=0.05):
    assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)


def test_a_function():
    params, x = inputs()
    plan = jt.plan(mlp, params, x, rules=[jt.Rule(weight="int8", act="int8")])
    near(jax.jit(plan.apply())(plan.quantize(params), x), mlp(params, x))
    assert str(jt.plan(mlp, params, x)) == str(plan)


class Planless:
    engine, disable_jit = None, False
    interceptor = apply = mlp


def test_a_provider():
    params, x = inputs()
    plan = jt.plan(lambda x, p: mlp(p, x), params, x, rules=jt.PtqProvider("int8", params_argnum=1))
    near(plan.apply()(x, plan.quantize(params)), mlp(params, x))
    with pytest.raises(TypeError, match="must be given to the provider"):
        jt.plan(mlp, params, x, rules=jt.PtqProvider("int8"), strict=True)
    with pytest.raises(TypeError, match="which has no method plan"):
        jt.plan(mlp, params, x, rules=Planless())


def test_the_providers_that_are_installed():
    found = {one.name: one.summary for one in jt.providers()}
    assert {"ptq", "qt"} <= found.keys()
    assert all(name in str(jt.providers()) for name in found)
    assert isinstance(jt.get_provider("ptq", rules="int8"), jt.PtqProvider)


def test_parameters_at_another_place():
    params, x = inputs()
    plan = jt.plan(lambda x, p: mlp(p, x), params, x, rules="int8", params_argnum=1)
    near(plan.apply()(x, plan.quantize(params)), mlp(params, x))


def nnx_model():
    from flax import nnx

    return nnx.Sequential(
        nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 16, rngs=nnx.Rngs(1))
    )


def linen_model():
    from flax import linen as nn

    net = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(16)])
    return net.bind(net.init(jax.random.key(0), jnp.ones((8, 32))))


def equinox_model():
    import equinox as eqx

    return eqx.nn.MLP(32, 16, 64, 1, key=jax.random.key(0))


@pytest.mark.parametrize("make", [nnx_model, linen_model, equinox_model])
@pytest.mark.parametrize("rules", ["w8a8", [jt.Rule(weight="int8")]])
def test_a_model_object(make, rules):
    model, (_, x) = make(), inputs()
    x = x[0] if make is equinox_model else x
    plan = jt.plan(model, x, rules=rules)
    assert len(plan.weights) == 2
    quantized = jt.quantize_model(model, rules, x)
    near(quantized(x), model(x), 0.06)
    assert str(jt.model_plan(quantized)) == str(plan)


def test_training():
    params, x = inputs()
    rule = xla.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    expected = jax.grad(lambda p: xla.QtProvider(rule).apply(mlp)(p, x).sum())(params)
    for loss in (
        jt.train(mlp),
        jt.train(mlp, "w8a8", gradient="int8"),
        jt.train(mlp, "w8a8", gradient=jt.Gradient("int8")),
        jt.train(mlp, "train-int8", gradient=jt.Gradient("int8")),
    ):
        found = jax.grad(lambda p, loss=loss: loss(p, x).sum())(params)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_gradient_of_a_rule_is_another():
    params, x = inputs()
    losses = jt.train(mlp, gradient="float8_e5m2"), jt.train(mlp)
    other, own = (jax.grad(lambda p, f=loss: f(p, x).sum())(params) for loss in losses)
    assert (other["up"] != own["up"]).any()
    with pytest.raises(ValueError, match="bwd_qtype must be None or a qtype"):
        jt.train(mlp, gradient="nonsense")


def test_quantize_model_for_training():
    model, (_, x) = nnx_model(), inputs()
    trained = jt.quantize_model(model, "train-int8", x)
    near(trained(x), model(x), 0.06)


def test_a_report():
    params, x = inputs()
    assert len(jt.report(mlp, params, x, rules="int8").ops) == 2
    scaled = jt.report(lambda p, x, by: by * mlp(p, x), params, x, by=2.0, rules="int8")
    assert len(scaled.ops) == 2
    assert len(jt.report(nnx_model(), x, rules="int8").ops) == 2


def test_a_plan_of_nothing():
    with pytest.raises(TypeError, match="got a Sequential alone"):
        jt.plan(nnx_model())


def test_adapters_and_passes():
    params, x = inputs()
    plan = jt.plan(mlp, params, x, rules="qlora")
    adapters = jt.lora.init(plan, jax.random.key(0))
    merged = jt.lora.merge(plan, plan.quantize(params), adapters)
    near(mlp(merged, x), plan.apply()(plan.quantize(params), x, adapters=adapters), 1e-3)
    plan = jt.plan(mlp, params, x, rules="int4")
    found = plan.optimize(params, [(x,)], [jt.passes.Gptq()]).params
    near(plan.apply()(found, x), mlp(params, x), 0.15)


def test_saved_and_loaded(tmp_path):
    params, x = inputs()
    plan = jt.plan(mlp, params, x, rules="int4/16")
    stored = plan.quantize(params)
    jt.save(tmp_path / "m.safetensors", stored, plan)
    again = jt.load(tmp_path / "m.safetensors", plan=plan)
    np.testing.assert_array_equal(plan.apply()(again, x), plan.apply()(stored, x))


def test_a_plan_of_a_third_party_without_a_method():
    class Plain:
        problems, weights = (), ()

        def quantize(self, params):
            return params

        def apply(self, fn):
            return fn

    class Provider:
        engine, disable_jit = None, False

        def interceptor(self):
            raise NotImplementedError

        def apply(self, fn):
            return fn

        def plan(self, fn, params, *args):
            return Plain()

    with pytest.raises(jt.QuantizationError, match=r"jaxtap\.report needs report\(\), got a Plain"):
        jt.report(lambda w, x: x @ w, jnp.ones((4, 2)), jnp.ones((3, 4)), rules=Provider())
    for call, name in (
        (lambda: jt.lora.init(Plain(), jax.random.key(0)), "init_adapters"),
        (lambda: jt.lora.merge(Plain(), {}, {}), "merge"),
    ):
        with pytest.raises(jt.QuantizationError, match=rf"needs {name}\(\), got a Plain without"):
            call()
