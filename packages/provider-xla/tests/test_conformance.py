"""Our own providers and bridges pass the tests that third parties' do."""

import dataclasses
from types import MappingProxyType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from interception_core import Interceptor, get_engine
from interception_core.testing import ProviderConformance
from provider_xla import (
    QtRule,
    QuantizationRule,
    StoreError,
    load,
    load_extra,
    model_plan,
    quantize_model,
    save,
)
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


class Rounding:
    """A third party's provider: it knows nothing of provider-xla, and has a plan or none."""

    engine = None
    disable_jit = False

    def interceptor(self):
        def handler(call, lhs, rhs, **params):
            return call.proceed(lhs, jnp.round(jnp.asarray(rhs) * 64) / 64, **params)

        return Interceptor({"primitive:dot_general": handler}, key="rounding")

    def apply(self, fn):
        return get_engine(self.engine).wrap(fn, self.interceptor())


@dataclasses.dataclass
class RoundingPlan:
    problems: list
    weights: list

    def quantize(self, params):
        return jax.tree.map(
            lambda w: jnp.round(w * 64) / 64 if getattr(w, "ndim", 0) > 1 else w, params
        )

    def apply(self, fn):
        return fn


class Planning(Rounding):
    def plan(self, fn, params, *args):
        return RoundingPlan([], [w for w in jax.tree.leaves(params) if getattr(w, "ndim", 0) > 1])


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


def test_a_third_party_s_parameters_are_saved_without_their_plan(tmp_path):
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)}
    plan = Planning().plan(None, params)
    stored, path = plan.quantize(params), tmp_path / "w.safetensors"
    with pytest.raises(StoreError, match=r"got a RoundingPlan\. Of another .* leave plan out"):
        save(path, stored, plan)
    assert not path.exists()
    save(path, stored, extra={"plan": "rounding"})
    with pytest.raises(StoreError, match=r"got a RoundingPlan\. Of another .* pass template="):
        load(path, plan=plan)
    found = load(path, template=jax.eval_shape(plan.quantize, params))
    np.testing.assert_array_equal(found["w"], np.round(np.asarray(params["w"]) * 64) / 64)
    assert load_extra(path) == {"plan": "rounding"}


@pytest.mark.parametrize("wrong", [3, Interceptor, "ptq"])
def test_what_is_not_a_provider(wrong):
    with pytest.raises(TypeError, match="quantize_model takes a provider, such as PtqProvider"):
        quantize_model(TestNnx().model(), wrong)
