"""Our own providers and bridges pass the tests that third parties' do."""

from types import MappingProxyType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from interception_core.testing import ProviderConformance
from provider_xla import QtRule, QuantizationRule
from provider_xla.testing import BridgeConformance

W8A8 = {"weight_qtype": "int8", "act_qtype": "int8"}


class TestPtq(ProviderConformance):
    provider = "ptq"
    config = MappingProxyType({"rules": QuantizationRule(**W8A8)})


class TestQt(ProviderConformance):
    provider = "qt"
    config = MappingProxyType({"rules": QtRule(**W8A8, bwd_qtype="int8")})


class OfAFramework(BridgeConformance):
    def inputs(self):
        return (jnp.asarray(np.random.default_rng(1).normal(size=(4, 32)), jnp.float32),)


@pytest.mark.filterwarnings("ignore:jax.core.mapped_aval:DeprecationWarning")
class TestNnx(OfAFramework):
    def model(self):
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 8, rngs=rngs))


class TestLinen(OfAFramework):
    def model(self):
        net = linen.Sequential([linen.Dense(64), linen.relu, linen.Dense(8)])
        return net.bind(net.init(jax.random.key(0), *self.inputs()))


class TestEquinox(OfAFramework):
    def model(self):
        return eqx.nn.MLP(32, 8, 64, 1, key=jax.random.key(0))

    def inputs(self):
        return (super().inputs()[0][0],)
