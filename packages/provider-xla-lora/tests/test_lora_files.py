"""Files of parameters and models with adapters, also those of the first version."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.bridge_nets import TOKENS, equinox_net, linen_net, nnx_net
from jaxtap_testkit.store_samples import same
from provider_xla import forms
from provider_xla.store import manifest

nnx = pytest.importorskip("flax.nnx")


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
    return xla.LoraRule(module_path=path, **fields)


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


def as_first_written(rule):
    """A rule as the first version wrote it: a rank was a field of every rule."""
    return {**WRITE_RULE(rule), "class": "QuantizationRule"}


WRITE_RULE = manifest.rule_json


@pytest.mark.parametrize("file", ["a.safetensors", "a"])
def test_a_file_of_the_first_version(tmp_path, monkeypatch, file):
    params, x = {"w": jnp.eye(8)}, jnp.ones((2, 8))
    rule = xla.LoraRule(weight_qtype="int8", rank=2, alpha=3.0, dropout=0.1)
    plan = xla.PtqProvider(rule).plan(lambda p, x: x @ p["w"], params, x)
    stored, adapters = plan.quantize(params), plan.init_adapters(jax.random.key(0))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "rule_json", as_first_written)
        xla.save(tmp_path / file, stored, plan, extra=adapters)
    found = xla.read_manifest(tmp_path / file)
    assert found.plan["rules"][0]["class"] == "QuantizationRule"
    assert found.rules() == [rule]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(xla.load(tmp_path / file, plan=plan), stored)
    same(xla.load_extra(tmp_path / file), adapters)


def test_a_program_of_the_first_version():
    """Its trees say nothing of the kind of adapters: there were only LoRA's."""
    plan = xla.PtqProvider(xla.LoraRule(rank=2)).plan(
        lambda w, x: x @ w, jnp.eye(8), jnp.ones((2, 8))
    )
    form = plan.adapters["args[0]"].form
    text = json.dumps({"form": {"other": dataclasses.asdict(form)}}).encode()
    assert forms._read(text) == (form, "a", "b")
    assert forms._read(forms._written((form, "a", "b"))) == (form, "a", "b")
