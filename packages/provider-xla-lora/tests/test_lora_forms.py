"""Adapters over every stored form of a parameter: as of the merged parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from interception_core.testing import installed_plugins
from jaxtap_testkit.numbers import normal


def tied(p, t):
    return jnp.take(p["t"], t, axis=0) @ p["t"].T


def mapped(p, x):
    return jax.vmap(lambda w: x @ w)(p["w"])


def mapped_with_activations(p, x):
    return jax.vmap(lambda w, x: x @ w)(p["w"], jnp.stack([x, x + 1, x - 1, 2 * x]))


def scanned(p, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w @ w.T / 8), None), x, p["w"])[0]


RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, 64)), jnp.float32)
STACK = {"w": jnp.asarray(RNG.normal(size=(4, 64, 128)) / 8, jnp.float32)}
TABLE = {"t": jnp.asarray(RNG.normal(size=(16, 64)), jnp.float32)}
PROGRAMS = {
    "tied": (tied, TABLE, jnp.array([1, 3, 0])),
    "mapped": (mapped, STACK, X),
    "mapped with activations": (mapped_with_activations, STACK, X),
    "scanned": (scanned, STACK, X),
}
RULES = {
    "float": xla.Rule(lora=4),
    "int8": xla.Rule(weight="int8", lora=4),
    "int4": xla.Rule(weight=xla.Q("int4", tile=32), lora=4),
    "w8a8": xla.Rule(weight="int8", act="int8", lora=4),
    "nf4": xla.Rule(weight="nf4", lora=4),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "form", [pytest.param(one, marks=() if one == "int8" else pytest.mark.slow) for one in RULES]
)
@pytest.mark.parametrize("without", [(), {"te-ffi-kernels"}], ids=["packed", "not packed"])
def test_as_the_merged_parameter(name, form, without):
    fn, params, x = PROGRAMS[name]
    with installed_plugins(without=without):
        plan = xla.PtqProvider(RULES[form]).plan(fn, params, x)
        assert plan.adapters, "it has no adapter"
        adapters = jax.tree.map(
            lambda x: normal(*x.shape, seed=1) / 4, plan.init_adapters(jax.random.key(1))
        )
        stored, run = plan.quantize(params), plan.apply()

        def adapted(adapters, stored):
            return run(stored, x, adapters=adapters)

        def merged(adapters, stored):
            return fn(plan.merge(stored, adapters), x)

        @jax.jit  # compiled once for all four
        def both(*args):
            fns = adapted, merged
            slopes = [jax.grad(lambda *args, fn=fn: (fn(*args) ** 2).mean()) for fn in fns]
            return [one(*args) for one in (*fns, *slopes)]

        found, expected, gradient, exact = both(adapters, stored)
        error = 0.03 if form == "w8a8" else 1e-4
        assert np.abs(found - expected).max() < error * np.abs(expected).max()
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True):
            assert np.abs(one - other).max() < 5 * error * np.abs(other).max()
