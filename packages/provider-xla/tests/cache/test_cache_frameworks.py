"""The caches of Flax's attention, Linen and NNX, carried quantized."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import provider_xla as xla

HEADS, SIZE, LENGTH, BATCH = 4, 32, 12, 2
FLOAT = xla.QuantizationRule(weight_qtype=None, act_qtype=None)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        attend = nn.MultiHeadDotProductAttention(HEADS, decode=True, name="attention")
        x = x + attend(x)
        return x + nn.Dense(SIZE)(jax.nn.gelu(nn.Dense(2 * SIZE)(x)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Block()(Block()(x))


def assert_near(found, expected):
    """Check that what rounding a cache to int8 changes is within 1% of the result."""
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)


def inputs(count):
    return jax.random.normal(jax.random.key(5), (count, BATCH, 1, SIZE))


def test_linen():
    model = Model()
    variables = model.init(jax.random.key(0), jnp.ones((BATCH, LENGTH, SIZE)))
    params, cache = variables["params"], variables["cache"]

    def step(params, cache, x):
        given = {"params": params, "cache": cache}
        out, state = model.apply(given, x, mutable=["cache"])
        return out, state["cache"]

    rules = [xla.CacheRule("cache", path=r".*cached_(key|value).*"), FLOAT]
    plan = xla.PtqProvider(rules).plan(step, params, cache, inputs(1)[0])
    assert len(plan.caches) == 4
    assert all(one.reason is None for one in plan.caches.values())
    fn, plain = jax.jit(plan.apply(step)), jax.jit(step)
    held, floats = cache, cache
    for x in inputs(LENGTH):
        found, held = fn(params, held, x)
        expected, floats = plain(params, floats, x)
        assert_near(found, expected)
    kept = held["Block_1"]["attention"]["cached_value"]
    assert isinstance(kept, xla.CacheArray)
    assert held["Block_0"]["attention"]["cache_index"] == LENGTH


def test_linen_variables_in_one_argument():
    """A cache beside the parameters, in the argument that holds them."""
    model = Model()
    variables = model.init(jax.random.key(0), jnp.ones((BATCH, LENGTH, SIZE)))

    def step(variables, x):
        out, state = model.apply(variables, x, mutable=["cache"])
        return out, {**variables, **state}

    rules = [
        xla.CacheRule(0, path=r"\['cache'\].*"),
        xla.QuantizationRule(weight_qtype="int8"),
    ]
    plan = xla.PtqProvider(rules).plan(step, variables, inputs(1)[0])
    assert len(plan.caches) == 4
    assert all(path.startswith("args[0]['params']") for path in plan.weights)
    stored = plan.quantize_cache(plan.quantize(variables))
    fn, plain, floats = jax.jit(plan.apply(step)), jax.jit(step), variables
    for x in inputs(3):
        found, stored = fn(stored, x)
        expected, floats = plain(floats, x)
        assert_near(found, expected)
    assert isinstance(stored["cache"]["Block_0"]["attention"]["cached_key"], xla.CacheArray)


def test_nnx():
    attention = nnx.MultiHeadAttention(
        HEADS, SIZE, SIZE, decode=True, rngs=nnx.Rngs(0), keep_rngs=False
    )
    attention.init_cache((BATCH, LENGTH, SIZE))
    graph, params, cache = nnx.split(attention, nnx.Param, ...)

    def step(params, cache, x):
        model = nnx.merge(graph, params, cache)
        out = model(x)
        return out, nnx.state(model, nnx.Not(nnx.Param))

    rules = [xla.CacheRule("cache"), FLOAT]
    plan = xla.PtqProvider(rules).plan(step, params, cache, inputs(1)[0])
    assert len(plan.caches) == 2
    assert all(one.reason is None for one in plan.caches.values())
    fn, plain = jax.jit(plan.apply(step)), jax.jit(step)
    held, floats = plan.quantize_cache(cache), cache
    for x in inputs(LENGTH):
        found, held = fn(params, held, x)
        expected, floats = plain(params, floats, x)
        assert_near(found, expected)
    leaves = jax.tree.leaves(held, is_leaf=lambda node: isinstance(node, xla.CacheArray))
    assert sum(isinstance(leaf, xla.CacheArray) for leaf in leaves) == 2
