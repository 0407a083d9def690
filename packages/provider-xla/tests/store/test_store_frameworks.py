"""Modules of Equinox and states of Flax NNX come back as what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.store_samples import same

equinox = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
W8 = xla.QuantizationRule(weight_qtype="int8")


def check(path, fn, params, names):
    x = jnp.ones((3, 8))
    plan = xla.PtqProvider(W8).plan(fn, params, x)
    stored = plan.quantize(params)
    xla.save(path, stored, plan)
    loaded = xla.load(path, plan=plan)
    same(loaded, stored)
    assert type(loaded) is type(params)
    run = plan.apply(fn)
    np.testing.assert_array_equal(run(loaded, x), run(stored, x))
    assert [leaf.name for leaf in xla.read_manifest(path).params.leaves] == names


@pytest.mark.slow
def test_an_equinox_module_with_functions_among_its_leaves(tmp_path):
    net = equinox.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    names = [f"layers.{i}.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")]
    names += ["activation", "final_activation"]
    path = tmp_path / "a.safetensors"
    check(path, lambda net, x: jax.vmap(net)(x), net, names)
    with pytest.raises(xla.StoreError, match="template="):
        xla.load(path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", ["a.safetensors", "a"])
def test_an_nnx_state_with_random_keys(tmp_path, path):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.dense(x)

    definition, state = nnx.split(Model(nnx.Rngs(0)))
    leaves = ("dense.bias", "dense.kernel", "dropout.rngs.count", "dropout.rngs.key")
    names = [f"{leaf}.value" for leaf in leaves]
    check(tmp_path / path, lambda state, x: nnx.merge(definition, state)(x), state, names)
