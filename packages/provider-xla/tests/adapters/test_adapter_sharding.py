"""Sharded models stay sharded, stored or in training, and compute the same."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule, quantize_model

assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
columns, rows, whole = (NamedSharding(mesh, spec) for spec in (P(None, "d"), P("d"), P()))
x = jax.device_put(jax.random.normal(jax.random.key(0), (8, 16)), rows)
ptq = PtqProvider(QuantizationRule(weight_qtype="int8"))
qat = QtProvider(QtRule(weight_qtype="int8", act_qtype="int8"))

# NNX
net = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
expected = quantize_model(net, ptq, x)(jax.device_put(x, whole))
net.kernel.set_value(jax.device_put(net.kernel.get_value(), columns))
model = quantize_model(net, ptq, x, prepack=False)
assert model.kernel.get_raw_value().qvalue.sharding.spec == P(None, "d")
run = nnx.jit(lambda model, x: model(x))
np.testing.assert_allclose(run(model, x), expected, rtol=1e-5, atol=1e-5)
trained = quantize_model(net, qat)
assert trained.kernel.get_value().sharding == columns
grads = nnx.jit(nnx.grad(lambda model, x: jnp.sum(model(x) ** 2)))(trained, x)
assert jnp.isfinite(grads["kernel"].get_value()).all()

# Linen
net = linen.Dense(32)
variables = net.init(jax.random.key(1), x)
variables["params"]["kernel"] = jax.device_put(variables["params"]["kernel"], columns)
module, stored = quantize_model(net.bind(variables), ptq, x, prepack=False).unbind()
assert stored["params"]["kernel"].qvalue.sharding.spec == P(None, "d")
one = jax.device_put(jax.tree.map(np.asarray, stored), jax.devices()[0])
np.testing.assert_allclose(
    jax.jit(module.apply)(stored, x), module.apply(one, np.asarray(x)), rtol=1e-5, atol=1e-5
)

# Equinox
net = eqx.nn.Linear(16, 32, key=jax.random.key(0))
expected = jax.vmap(quantize_model(net, ptq, x[0]))(jax.device_put(x, whole))
net = eqx.tree_at(lambda net: net.weight, net, jax.device_put(net.weight, rows))
model = quantize_model(net, ptq, x[0], prepack=False)
assert model.weight.qvalue.sharding.spec == P("d")
run = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
np.testing.assert_allclose(run(model, x), expected, rtol=1e-5, atol=1e-5)
print("done")
"""


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("flax", "equinox"))), reason="needs flax and equinox"
)
def test_sharded_models():
    flags = "--xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "done" in run.stdout
