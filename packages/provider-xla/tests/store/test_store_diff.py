"""Loading with another plan, or into another tree, says what differs."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.store_samples import mlp, mlp_params, mlp_plan, same

pytestmark = pytest.mark.sample(2)

W4 = xla.QuantizationRule(weight_qtype="int4", tile_size=8)
W8 = xla.QuantizationRule(weight_qtype="int8")


@pytest.fixture(params=["file.safetensors", "folder"])
def path(request, tmp_path):
    return tmp_path / request.param


@pytest.fixture
def params():
    return mlp_params(depth=1)


def saved(path, plan, params):
    stored = plan.quantize(params)
    xla.save(path, stored, plan)
    return stored


def refusal(path, plan):
    with pytest.raises(xla.StoreMismatchError) as caught:
        xla.load(path, plan=plan)
    message = str(caught.value)
    first, *lines, last = message.split("\n")
    assert first == f"{path} was saved with another plan than the one to load it with."
    assert last.startswith("Load it with its own plan")
    assert str(caught.value.diff) == "\n".join(lines)
    assert str(pickle.loads(pickle.dumps(caught.value)).diff) == str(caught.value.diff)
    return lines


@pytest.mark.slow
def test_another_format(path, params):
    saved(path, mlp_plan(W4, params=params), params)
    was = "tiles of 8 along axis 0 and per index of axis 1 -> per index of axis 1"
    assert refusal(path, mlp_plan(W8, params=params)) == [
        "leaves that differ (stored -> planned):",
        f"  head: format int4 -> int8; granularity {was}",
        f"  layers.0.w: format int4 -> int8; granularity {was}",
        "rules that differ (stored -> planned):",
        "  rule 0: tile_size 8 -> default, weight_qtype int4 -> int8",
    ]


def test_another_tile(path, params):
    saved(path, mlp_plan(W4, params=params), params)
    rules = dataclasses.replace(W4, module_path="nothing"), dataclasses.replace(W4, tile_size=4)
    with pytest.warns(xla.QuantizationWarning):
        plan = mlp_plan(*rules, params=params)
    assert refusal(path, plan)[1:] == [
        *(
            f"  {name}: granularity tiles of 8 along axis 0 and per index of axis 1 -> "
            "tiles of 4 along axis 0 and per index of axis 1"
            for name in ("head", "layers.0.w")
        ),
        "rules that differ (stored -> planned):",
        "  rule 0: module_path default -> nothing",
        "  rule 1, only in the plan: QuantizationRule(tile_size=4, weight_qtype='int4')",
    ]


@pytest.mark.sample(1)
def test_other_ends_of_tiles_and_dtypes_of_scales(path):
    def plan(rule):
        return xla.PtqProvider([rule]).plan(lambda p, x: x @ p["w"], params, jnp.ones((2, 72)))

    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(72, 5)), jnp.float32)}
    rule = dataclasses.replace(W4, tile_size=32, tile_fallback="padded")
    saved(path, plan(rule), params)
    # Three tiles in both cases: 32 + 32 + 8, and 24 each.
    lines = refusal(path, plan(dataclasses.replace(rule, tile_size=24)))
    end = "along axis 0 and per index of axis 1"
    assert f"  w: granularity tiles of 32 {end} -> tiles of 24 {end}" in lines
    half = dataclasses.replace(rule, scale_dtype="float16")
    # The float32 scales may be what float16 does not hold.
    with pytest.warns(xla.QuantizationWarning, match="scale_dtype default -> float16"):
        xla.load(path, plan=plan(half))
    xla.save(path, plan(half).quantize(params), plan(half), overwrite=True)
    assert "  w: dtype of scales float16 -> float32" in refusal(path, plan(rule))


@pytest.mark.sample(1)
def test_another_method(path, params):
    saved(
        path,
        mlp_plan(dataclasses.replace(W8, weight_calibration_method="mse"), params=params),
        params,
    )
    lines = refusal(path, mlp_plan(W8, params=params))
    assert "  layers.0.w: calibration method mse -> absmax" in lines


def test_what_stays_float(path, params):
    saved(path, mlp_plan(W8, params=params), params)
    with pytest.warns(xla.QuantizationWarning):
        plan = mlp_plan(xla.QuantizationRule(module_path="no", weight_qtype="int8"), params=params)
    assert "  head: format int8 -> float" in refusal(path, plan)


@pytest.mark.slow
def test_other_parameters(path, params):
    saved(path, mlp_plan(W8, params=params), params)
    other = mlp_params(depth=2, width=16, out=4)
    other["head"] = other["head"].astype(jnp.bfloat16)
    other["layers"][0] = {"kernel": jnp.ones((16, 16)), "b": jnp.ones(16)}

    def model(params, x):
        x = x @ params["layers"][0]["kernel"] @ params["layers"][1]["w"]
        return x.astype(jnp.bfloat16) @ params["head"]

    plan = xla.PtqProvider(W8).plan(model, other, jnp.ones((2, 16)))
    assert refusal(path, plan) == [
        "leaves that differ (stored -> planned):",
        "  head: shape [16, 6] -> [16, 4]; dtype float32 -> bfloat16",
        "missing in the file:",
        "  layers.0.kernel: float32[16, 16] quantized to int8",
        "  layers.1.b: float32[16]",
        "  layers.1.w: float32[16, 16] quantized to int8",
        "only there:",
        "  layers.0.w: float32[16, 16] quantized to int8",
    ]


@pytest.mark.slow
def test_rules_alone(path, params):
    """The parameters fit: loaded, with a warning that says what is other."""
    plan = mlp_plan(W8, params=params)
    stored = saved(path, plan, params)
    other = mlp_plan(dataclasses.replace(W8, act_qtype="int8"), params=params)
    with pytest.warns(xla.QuantizationWarning, match="rule 0: act_qtype default -> int8"):
        same(xla.load(path, plan=other), stored)
    diff = xla.read_manifest(path).diff(other)
    assert diff
    assert not diff.of_leaves
    same(xla.load(path, plan=mlp_plan(W8, params=params)), stored)


def test_a_file_without_a_plan(path, params):
    """What is inside is compared, whatever quantized it."""
    plan = mlp_plan(W4, params=params)
    stored = plan.quantize(params)
    xla.save(path, stored)
    same(xla.load(path, plan=plan), stored)
    assert "  head: format int4 -> int8" in "\n".join(refusal(path, mlp_plan(W8, params=params)))


def test_saving_what_the_plan_did_not_quantize(path, params):
    with pytest.raises(xla.StoreMismatchError, match="head: format float -> int8"):
        xla.save(path, params, mlp_plan(W8, params=params))
    assert not path.exists()


@pytest.mark.sample(1)
def test_templates(path, params):
    stored = saved(path, mlp_plan(W4, params=params), params)
    for template in (params, stored, jax.eval_shape(lambda: params)):
        same(xla.load(path, template=template), stored)
    with pytest.raises(xla.StoreMismatchError, match=r"b: shape \[16\] -> \[3\]"):
        xla.load(path, template={**params, "layers": [{**params["layers"][0], "b": jnp.ones(3)}]})
    with pytest.raises(xla.StoreMismatchError, match="head: format int4 -> int8"):
        xla.load(path, template=mlp_plan(W8, params=params).quantize(params))
    with pytest.raises(
        xla.StoreMismatchError, match=r"(?s)missing in the file.*tail.*only there.*head"
    ):
        xla.load(path, template={"layers": params["layers"], "tail": params["head"]})


def test_leaves_that_cannot_be_saved(path):
    @jax.jit
    def traced(x):
        xla.save(path, {"a": x})
        return x

    with pytest.raises(xla.StoreError, match="outside of jit"):
        traced(jnp.ones(2))
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(xla.StoreError, match="a was deleted"):
        xla.save(path, {"a": gone})
    with pytest.raises(xla.StoreError, match="a is abstract"):
        xla.save(path, {"a": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(xla.StoreError, match="a is a ndarray of object"):
        xla.save(path, {"a": np.array([None])})
    with pytest.raises(xla.StoreError, match="save what it holds"):
        xla.save(path, {"a": jax.new_ref(jnp.ones(2))})
    with pytest.raises(xla.StoreError, match="key of a dict"):
        xla.save(path, {frozenset(): jnp.ones(2)})
    with pytest.raises(xla.StoreError, match="format is 'npz'"):
        xla.save(path, {}, format="npz")
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("a.safetensors", "safetensors", "safetensors"),
        ("a", "orbax.checkpoint", "orbax"),
    ],
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, name, module, extra):
    xla.save(tmp_path / name, {"a": jnp.ones(2)})
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ImportError, match=rf"provider-xla\[{extra}\]"):
        xla.load(tmp_path / name)


def test_a_function_of_a_plan_is_taken_from_it(path):
    """As of Equinox modules, whose leaves may be functions."""
    params = {**mlp_params(depth=1), "act": jnp.tanh}
    plan = xla.PtqProvider(W8).plan(mlp, params, jnp.ones((2, 16)))
    stored = plan.quantize(params)
    xla.save(path, stored, plan)
    same(xla.load(path, plan=plan), stored)
