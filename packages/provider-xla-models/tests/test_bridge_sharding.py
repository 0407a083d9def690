"""Sharded models stay sharded, stored or in training, and compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.meshes import line, put
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule, quantize_model

PTQ = PtqProvider(QuantizationRule(weight_qtype="int8"))
QAT = QtProvider(QtRule(weight_qtype="int8", act_qtype="int8"))
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
# What a kernel, where there is one, may be off: of more than four rows of floats it takes 15 bits.
IN_KERNELS = 1e-4


@pytest.fixture(autouse=True)
def kernels():
    """Those that are installed: they multiply in a model that is on one device."""


@pytest.fixture
def mesh():
    return line(size=4)


def assert_near(actual, expected, off=1e-5):
    scale = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=off * scale)


@pytest.mark.slow
def test_nnx(mesh):
    nnx = pytest.importorskip("flax.nnx")
    net, x = nnx.Linear(16, 32, rngs=nnx.Rngs(0)), put(mesh, X, "d")
    expected = quantize_model(net, PTQ, x)(put(mesh, X))
    kernel = put(mesh, net.kernel.get_value(), None, "d")
    net.kernel.set_value(kernel)
    model = quantize_model(net, PTQ, x, prepack=False)
    assert model.kernel.get_raw_value().qvalue.sharding.spec == kernel.sharding.spec
    run = nnx.jit(lambda model, x: model(x))
    assert_near(run(model, x), expected, IN_KERNELS)
    trained = quantize_model(net, QAT)
    assert trained.kernel.get_value().sharding == kernel.sharding
    grads = nnx.jit(nnx.grad(lambda model, x: jnp.sum(model(x) ** 2)))(trained, x)
    assert jnp.isfinite(grads["kernel"].get_value()).all()


@pytest.mark.slow
def test_linen(mesh):
    linen = pytest.importorskip("flax.linen")
    net, x = linen.Dense(32), put(mesh, X, "d")
    variables = net.init(jax.random.key(1), x)
    kernel = put(mesh, variables["params"]["kernel"], None, "d")
    variables["params"]["kernel"] = kernel
    module, stored = quantize_model(net.bind(variables), PTQ, x, prepack=False).unbind()
    assert stored["params"]["kernel"].qvalue.sharding.spec == kernel.sharding.spec
    one = jax.device_put(jax.tree.map(np.asarray, stored), jax.devices()[0])
    assert_near(jax.jit(module.apply)(stored, x), module.apply(one, X))


@pytest.mark.slow
def test_equinox(mesh):
    eqx = pytest.importorskip("equinox")
    net, x = eqx.nn.Linear(16, 32, key=jax.random.key(0)), put(mesh, X, "d")
    expected = jax.vmap(quantize_model(net, PTQ, x[0]))(put(mesh, X))
    net = eqx.tree_at(lambda net: net.weight, net, put(mesh, net.weight, "d"))
    model = quantize_model(net, PTQ, x[0], prepack=False)
    assert model.weight.qvalue.sharding.spec == net.weight.sharding.spec
    run = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    assert_near(run(model, x), expected, IN_KERNELS)
