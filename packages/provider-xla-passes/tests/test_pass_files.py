"""What passes, allocation and adapters make of parameters is saved as well."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import provider_xla as xla
from interception_core.testing import installed_plugins
from jaxtap_testkit.store_samples import mlp, mlp_params, mlp_plan, quantized, same
from provider_xla_passes import transformed

PASSES = {
    "scaled": [xla.SmoothQuant()],
    "rotated": [xla.Hadamard(), xla.Gptq()],
}


@pytest.fixture(params=["a.safetensors", "a"])
def path(request, tmp_path):
    return tmp_path / request.param


def stack(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["ws"])[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "file"), [("scaled", "a.safetensors"), ("rotated", "a")])
def test_transformed_weights(tmp_path, name, file):
    path = tmp_path / file
    rng = np.random.default_rng(0)
    params = {"ws": jnp.asarray(rng.normal(size=(2, 16, 16)), jnp.float32)}
    x = jnp.asarray(rng.normal(size=(32, 16)), jnp.float32)
    rule = xla.QuantizationRule(weight_qtype="int3", act_qtype="int8", tile_size=8)
    plan = xla.PtqProvider(rule).plan(stack, params, x)
    stored = plan.optimize(params, [(x,)], PASSES[name]).params
    assert isinstance(stored["ws"], xla.TransformedWeight)
    xla.save(path, stored, plan)
    for loaded in (xla.load(path), xla.load(path, plan=plan), xla.load(path, template=stored)):
        same(loaded, stored)
    np.testing.assert_array_equal(plan.apply(stack)(loaded, x), plan.apply(stack)(stored, x))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, stored)
    same(xla.load(path, sharding=shardings), stored)


@pytest.mark.sample(1)
def test_every_step(path):
    steps = (
        transformed.Scaled(jnp.arange(1.0, 65.0)),
        transformed.Rotated(jnp.asarray(np.resize([1, -1], 64), jnp.int8), 32),
    )
    inner = quantized("int4", (3, 64, 6))
    tree = [xla.TransformedWeight(inner, steps, (-2,)), xla.TransformedWeight(inner, (), (-2,))]
    xla.save(path, tree)
    same(xla.load(path), tree)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    same(xla.load(path, sharding=one), tree)
    odd = xla.TransformedWeight(inner, (jnp.ones(64),), (-2,))
    with pytest.raises(xla.StoreError, match="among its steps"):
        xla.save(path, odd, overwrite=True)


@pytest.mark.slow
def test_an_allocated_plan_is_made_again_of_its_rules(path):
    params = mlp_params()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8")).plan(mlp, params, x)
    plan = plan.allocate(params, x, budget_bits=5.5, qtypes=["int2", "int4", "int8"])
    stored = plan.quantize(params)
    xla.save(path, stored, plan)
    with pytest.warns(xla.QuantizationWarning, match="rule 2 has no effect"):  # nor did it there
        again = xla.PtqProvider(xla.read_manifest(path).rules()).plan(mlp, params, x)
    same(xla.load(path, plan=again), stored)


def test_sparse_weights_of_a_float_file(tmp_path):
    params = mlp_params(depth=1)
    layer = params["layers"][0]
    tensors = {"head": params["head"], "layers.0.w": layer["w"], "layers.0.b": layer["b"]}
    source = tmp_path / "float.safetensors"
    safetensors.numpy.save_file({k: np.asarray(v) for k, v in tensors.items()}, source)
    plan = mlp_plan(xla.QuantizationRule(weight_qtype="int8", sparsity="2:4"), params=params)
    stored = plan.quantize(params)
    assert (np.asarray(stored["head"].qvalue) == 0).mean() >= 0.5
    same(xla.quantize_file(plan, source), stored)
    xla.quantize_file(plan, source, tmp_path / "a.safetensors")
    same(xla.load(tmp_path / "a.safetensors", plan=plan), stored)


def test_what_a_template_does_not_hold():
    w, x = (
        jnp.asarray(np.random.default_rng(1).normal(size=(32, 16)), jnp.float32),
        jnp.ones((4, 32)),
    )
    plan = xla.PtqProvider("int4/16").plan(lambda w, x: x @ w, w, x)
    found = plan.optimize(w, [(x,)], [xla.Hadamard()]).params
    with pytest.raises(xla.QuantizationError, match="A TransformedWeight holds more"):
        xla.quantize_params(w, found)


def test_a_file_where_this_package_is_missing(tmp_path):
    path = tmp_path / "a.safetensors"
    step = transformed.Rotated(jnp.ones(64, jnp.int8), 32)
    xla.save(path, xla.TransformedWeight(quantized("int4", (2, 64, 6)), (step,), (-2,)))
    told = r"got 'transformed'.*'provider-xla\[passes\]'"
    without = installed_plugins(without={"provider-xla-passes"})
    with without, pytest.raises(xla.StoreError, match=told):
        xla.load(path)


def test_numpy_makes_parameters_of_64_bits(tmp_path):
    """Where x64 is off, what passes store beside weights has the dtype that the program gets."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(32, 16)), "bias": rng.normal(size=16)}
    x = jnp.asarray(rng.normal(size=(64, 32)), jnp.float32)

    def model(params, x):
        return jnp.dot(x, params["w"]) + params["bias"]

    plan = xla.PtqProvider("int4").plan(model, params, x)
    # A warning of JAX about float64 is an error here.
    plan.allocate(params, x, budget_bits=5)
    stored = plan.optimize(params, [(x,)], [xla.Gptq()]).params
    xla.save(tmp_path / "a.safetensors", stored, plan)
    loaded = xla.load(tmp_path / "a.safetensors", plan=plan)
    assert loaded["bias"].dtype == np.float32
    exact = np.asarray(x, np.float64) @ params["w"] + params["bias"]
    error = np.linalg.norm(np.asarray(plan.apply()(loaded, x), np.float64) - exact)
    assert error < 0.15 * np.linalg.norm(exact)
