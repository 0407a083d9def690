"""Our own providers pass the tests that third parties' do; plans of third parties in files."""

import dataclasses
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interception_core import Interceptor, UnknownNameError
from interception_core.testing import ProviderConformance
from jaxtap_testkit.rounding import Planning, RoundingPlan
from provider_xla import (
    PtqProvider,
    QtRule,
    QuantizationRule,
    StoreError,
    StoreMismatchError,
    load,
    load_extra,
    quantize_file,
    quantize_model,
    read_manifest,
    save,
)

W8A8 = {"weight_qtype": "int8", "act_qtype": "int8"}


class TestPtq(ProviderConformance):
    provider = "ptq"
    config = MappingProxyType({"rules": QuantizationRule(**W8A8)})


class TestQt(ProviderConformance):
    provider = "qt"
    config = MappingProxyType({"rules": QtRule(**W8A8, bwd_qtype="int8")})


def test_a_plan_that_cannot_be_stored(tmp_path):
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)}
    plan = Planning().plan(None, params)
    stored, path = plan.quantize(params), tmp_path / "w.safetensors"
    with pytest.raises(StoreError, match=r"got a RoundingPlan without\. .* or leave plan out"):
        save(path, stored, plan)
    with pytest.raises(StoreError, match="quantize_file needs a plan of provider-xla, got a R"):
        quantize_file(plan, path)
    assert not path.exists()
    save(path, stored, extra={"plan": "rounding"})
    with pytest.raises(StoreError, match=r"got a RoundingPlan without\. .* or pass template="):
        load(path, plan=plan)
    found = load(path, template=jax.eval_shape(plan.quantize, params))
    np.testing.assert_array_equal(found["w"], np.round(np.asarray(params["w"]) * 64) / 64)
    assert load_extra(path) == {"plan": "rounding"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Halves:
    """A stored parameter of a third party, which provider-xla has not seen before."""

    values: jax.Array
    scale: jax.Array


@dataclasses.dataclass
class HalvesPlan(RoundingPlan):
    params: dict
    bits: int
    said: dict

    def quantize(self, params):
        def stored(w):
            scale = jnp.max(jnp.abs(w)) / 2 ** (self.bits - 1)
            return Halves(jnp.round(w / scale).astype(jnp.int8), scale)

        return {name: stored(w) if w.ndim > 1 else w for name, w in params.items()}

    def manifest(self):
        return {"provider": "halves", "config": {"bits": self.bits}, **self.said}

    def stored_types(self):
        return jax.eval_shape(self.quantize, self.params)


def halves(bits=4, **said):
    """Return a plan, and parameters."""
    rng = np.random.default_rng(0)
    shapes = {"up": (8, 4), "down": (4, 8), "bias": (8,)}
    params = {name: jnp.asarray(rng.normal(size=n), jnp.float32) for name, n in shapes.items()}
    return HalvesPlan([], ["up", "down"], params, bits, said), params


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["w.safetensors", "folder", "shards"])
def test_a_plan_of_a_third_party_is_stored(tmp_path, name):
    plan, params = halves(tiles=[4, 8])
    stored, path = plan.quantize(params), tmp_path / name
    save(path, stored, plan, format="shards" if name == "shards" else None)
    found = load(path, plan=halves(tiles=[4, 8])[0])
    assert jax.tree.structure(found) == jax.tree.structure(stored)
    jax.tree.map(np.testing.assert_array_equal, found, stored)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"int8", "float32"}
    manifest = read_manifest(path)
    assert manifest.plan == plan.manifest()
    # Without a plan, a class of another package comes back as its fields.
    plain = load(path)
    np.testing.assert_array_equal(plain["up"]["values"], stored["up"].values)

    with pytest.raises(StoreMismatchError, match=r"config\.bits: 4 -> 5"):
        load(path, plan=halves(5, tiles=[4, 8])[0])
    with pytest.raises(StoreMismatchError, match=r"tiles: \[4, 8\] -> None"):
        load(path, plan=halves()[0])
    provider = PtqProvider(QuantizationRule(**W8A8))
    ours = provider.plan(lambda p, x: x @ p["up"], params, jnp.ones((2, 8)))
    with pytest.raises(StoreMismatchError, match=r"another plan than the one"):
        load(path, plan=ours)
    with pytest.raises(StoreError, match=r"of the provider 'halves'\. manifest\.provider\(\)"):
        manifest.rules()
    with pytest.raises(UnknownNameError, match="halves"):
        manifest.provider()


def test_parameters_and_plans_of_a_third_party_that_do_not_fit(tmp_path):
    plan, params = halves()
    path = tmp_path / "w.safetensors"
    with pytest.raises(StoreMismatchError, match=r"up\.values"):
        save(path, params, plan)
    for said, match in [
        ({"provider": 3}, "must have a name"),
        ({"config": None}, "must have a name"),
        ({"range": float("nan")}, "must return JSON's types"),
        ({"dtype": jnp.dtype("int8")}, "must return JSON's types"),
    ]:
        wrong, _ = halves(**said)
        with pytest.raises(StoreError, match=match):
            save(path, plan.quantize(params), wrong)
    assert not path.exists()
    # Of a file without a plan, the leaves are compared alone.
    save(path, plan.quantize(params))
    assert isinstance(load(path, plan=plan)["up"], Halves)
    provider = PtqProvider(QuantizationRule(**W8A8))
    ours = provider.plan(lambda w, x: x @ w, params["up"], jnp.ones((2, 8)))
    save(path, ours.quantize(params["up"]), ours, overwrite=True)
    assert isinstance(read_manifest(path).provider(), PtqProvider)
    with pytest.raises(StoreMismatchError):
        load(path, plan=plan)


@pytest.mark.parametrize("wrong", [3, Interceptor, [None]])
def test_what_is_not_a_provider(wrong):
    with pytest.raises(TypeError, match="A model takes a provider, such as PtqProvider"):
        quantize_model(object(), wrong)
