"""Modules of Equinox and states of Flax NNX come back as what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.bridge_nets import TOKENS, equinox_net, linen_net, nnx_net
from jaxtap_testkit.store_samples import same

equinox = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
W8 = xla.QuantizationRule(weight_qtype="int8")


def check(path, fn, params, names):
    x = jnp.ones((3, 8))
    plan = xla.PtqProvider(W8).plan(fn, params, x)
    stored = plan.quantize(params)
    xla.save(path, stored, plan)
    loaded = xla.load(path, plan=plan)
    same(loaded, stored)
    assert type(loaded) is type(params)
    run = plan.apply(fn)
    np.testing.assert_array_equal(run(loaded, x), run(stored, x))
    assert [leaf.name for leaf in xla.read_manifest(path).params.leaves] == names


@pytest.mark.slow
def test_an_equinox_module_with_functions_among_its_leaves(tmp_path):
    net = equinox.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    names = [f"layers.{i}.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")]
    names += ["activation", "final_activation"]
    path = tmp_path / "a.safetensors"
    check(path, lambda net, x: jax.vmap(net)(x), net, names)
    with pytest.raises(xla.StoreError, match="template="):
        xla.load(path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", ["a.safetensors", "a"])
def test_an_nnx_state_with_random_keys(tmp_path, path):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.dense(x)

    definition, state = nnx.split(Model(nnx.Rngs(0)))
    leaves = ("dense.bias", "dense.kernel", "dropout.rngs.count", "dropout.rngs.key")
    names = [f"{leaf}.value" for leaf in leaves]
    check(tmp_path / path, lambda state, x: nnx.merge(definition, state)(x), state, names)


def of_equinox():
    """A quantized model, its tree, what runs a tree, and names of the leaves of one weight."""
    provider = xla.PtqProvider(rule(".*mlp.*"))
    model = xla.quantize_model(equinox_net(), provider, TOKENS[0])
    weight = "blocks.0.mlp.layers.0.weight"
    return model, model, lambda tree: tree(TOKENS[0]), (weight, f"{weight}.a", f"{weight}.b")


def of_linen():
    net, variables = linen_net()
    model = xla.quantize_model(net.bind(variables), xla.PtqProvider(rule()), TOKENS)
    module, tree = model.unbind()
    weight = "block_0.up.kernel"
    names = (f"params.{weight}", f"lora.{weight}.a", f"lora.{weight}.b")
    return model, tree, lambda tree: module.apply(tree, TOKENS), names


def of_nnx():
    model = xla.quantize_model(nnx_net(), xla.PtqProvider(rule()), TOKENS)
    definition, state = nnx.split(model)

    def run(tree):
        nnx.replace_by_pure_dict(state, tree)
        return nnx.merge(definition, state)(TOKENS)

    weight = "blocks.0.up.kernel"
    names = (weight, f"{weight}_lora_a", f"{weight}_lora_b")
    return model, nnx.to_pure_dict(state), run, names


def rule(path=".*(up|down)", **fields):
    fields = {"weight_qtype": "int8", "rank": 2, "alpha": 4.0, **fields}
    return xla.QuantizationRule(module_path=path, **fields)


def trained(tree):
    """A tree with other adapters than those that change nothing."""
    return jax.tree.map(lambda x: x + 0.25 if getattr(x, "shape", ())[-2:].count(2) else x, tree)


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_equinox, of_linen, of_nnx])
def test_models_with_adapters(tmp_path, make):
    model, tree, run, names = make()
    plan, new = xla.model_plan(model), trained(tree)
    expected = run(new)
    assert np.abs(np.asarray(expected - run(tree))).max() > 0.01
    for file in ("a.safetensors", "a"):
        xla.save(tmp_path / file, new, plan)
        found = {leaf.name for leaf in xla.read_manifest(tmp_path / file).params.leaves}
        assert found >= {*names}
        loaded = xla.load(tmp_path / file, plan=plan, template=tree)
        same(loaded, new)
    np.testing.assert_array_equal(run(loaded), expected)


def test_adapters_are_those_of_the_plan(tmp_path):
    model, tree, *_ = of_linen()
    plan = xla.model_plan(model)
    lora = tree["lora"]["block_0"]["up"]["kernel"]
    wrong = {**tree, "lora": {"kernel": lora}}
    with pytest.raises(xla.StoreMismatchError, match=r"only there:\n  lora\.kernel\.a"):
        xla.save(tmp_path / "a", wrong, plan)
    xla.save(tmp_path / "a", tree, plan)
    with pytest.raises(xla.StoreMismatchError, match="Pass template="):
        xla.load(tmp_path / "a", plan=plan)


def test_an_equinox_model_with_adapters_as_its_plan_has_it(tmp_path):
    model, tree, *_ = of_equinox()
    plan, new = xla.model_plan(model), trained(tree)
    xla.save(tmp_path / "a.safetensors", new, plan)
    loaded = xla.load(tmp_path / "a.safetensors", plan=plan)
    weight = loaded.blocks[0].mlp.layers[0].weight
    assert isinstance(weight, xla.AdaptedWeight)
    assert weight.form == new.blocks[0].mlp.layers[0].weight.form
    same(jax.tree.leaves(loaded), jax.tree.leaves(new))
