"""Our own bridges pass the tests that third parties' do, with providers of third parties, too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxtap_testkit.rounding import Planning, Rounding
from provider_xla import model_plan, quantize_model
from provider_xla.testing import BridgeConformance


class OfAFramework(BridgeConformance):
    def inputs(self):
        return (jnp.asarray(np.random.default_rng(1).normal(size=(4, 32)), jnp.float32),)


@pytest.mark.filterwarnings("ignore:jax.core.mapped_aval:DeprecationWarning")
class TestNnx(OfAFramework):
    def model(self):
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 8, rngs=rngs))


@pytest.mark.slow
class TestLinen(OfAFramework):
    def model(self):
        net = linen.Sequential([linen.Dense(64), linen.relu, linen.Dense(8)])
        return net.bind(net.init(jax.random.key(0), *self.inputs()))


@pytest.mark.slow
class TestEquinox(OfAFramework):
    def model(self):
        return eqx.nn.MLP(32, 8, 64, 1, key=jax.random.key(0))

    def inputs(self):
        return (super().inputs()[0][0],)


@pytest.mark.sample(3)
@pytest.mark.parametrize("provider", [Rounding(), Planning()], ids=["plain", "planning"])
@pytest.mark.parametrize("framework", [TestNnx, TestLinen, TestEquinox])
def test_a_third_party_s_provider_quantizes_models(provider, framework):
    bridge = framework()
    model = bridge.model()
    made = quantize_model(model, provider, *bridge.inputs())
    assert isinstance(made, type(model))
    result, exact = bridge.run(made), bridge.run(model)
    bridge._close(result, exact, 0.2)
    assert not np.array_equal(result, exact)
    assert (model_plan(made) is None) == (type(provider) is Rounding)
