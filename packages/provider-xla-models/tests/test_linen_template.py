"""Linen modules that are not bound, as Qwix has them: stored by ``init``, or by a template."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import provider_xla as xla
import quant_numerics as qn
from interception_core.testing import installed_plugins


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(16, use_bias=False)(x)


X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32)
KEY = jax.random.key(0)
VARIABLES = jax.jit(Net().init)(KEY, X)


@pytest.mark.parametrize("preset", ["int8", "w8a8", "int4/16", "nf4"])
@pytest.mark.parametrize("kernels", [False, True])
def test_stored_by_a_template(preset, kernels):
    with installed_plugins(without=() if kernels else {"te-ffi-kernels"}):
        check_template(preset)


def check_template(preset):
    net = Net()
    variables = VARIABLES
    quantized = xla.quantize_model(net, preset)
    types = jax.eval_shape(quantized.init, KEY, X)
    assert jax.tree.structure(types["batch_stats"]) == jax.tree.structure(variables["batch_stats"])
    stored = xla.quantize_params(variables["params"], types["params"])
    assert jax.tree.structure(stored) == jax.tree.structure(types["params"])
    for name in ("Dense_0", "Dense_1"):
        assert qn.is_form(stored[name]["kernel"])
    found = jax.jit(quantized.apply)({**variables, "params": stored}, X)
    expected = jax.jit(net.apply)(variables, X)
    most = 0.15 if "4" in preset else 0.03
    assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)
    # As a plan of the same function stores them.
    plan = xla.PtqProvider(preset).plan(net.apply, variables, X)
    planned = plan.quantize(variables)["params"]
    for one, other in zip(jax.tree.leaves(stored), jax.tree.leaves(planned), strict=True):
        np.testing.assert_array_equal(one, other)


def test_init_stores():
    quantized = xla.quantize_model(Net(), "int8")
    variables = quantized.init({"params": KEY, "dropout": jax.random.key(1)}, X)
    assert qn.is_form(variables["params"]["Dense_0"]["kernel"])
    exact = jax.jit(Net().apply)(VARIABLES, X)
    found = jax.jit(quantized.apply)(variables, X)
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)


def test_init_of_training_stays_float():
    variables = jax.jit(xla.quantize_model(Net(), "train-int8").init)(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, variables, VARIABLES)


def test_other_trees_are_refused():
    net = Net()
    params = VARIABLES["params"]
    types = jax.eval_shape(xla.quantize_model(net, "int8").init, KEY, X)["params"]
    with pytest.raises(xla.QuantizationError, match="must be a tree like the stored one"):
        xla.quantize_params({"Dense_0": params["Dense_0"]}, types)
    wide = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), params)
    with pytest.raises(xla.QuantizationError, match=r"must have shape \[64\], got \[2, 64\]"):
        xla.quantize_params(wide, types)
