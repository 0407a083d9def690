"""The caches of Flax's attention, Linen and NNX, carried quantized."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import provider_xla as xla
from jaxtap_testkit.cached_decoders import rounded
from jaxtap_testkit.numbers import normal

HEADS, SIZE, LENGTH, BATCH = 4, 32, 12, 2
STEPS = 4
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def float_caches(rule=None):
    return xla.PtqProvider([rule or xla.CacheRule("cache"), FLOAT], strict=True)


def bound_model():
    model = Model()
    variables = model.init(jax.random.key(0), jnp.ones((BATCH, LENGTH, SIZE)))
    return model.bind(variables, mutable=["cache"])


@pytest.mark.slow
def test_linen_model():
    """A bound module keeps its collection quantized, and writes to it."""
    model = bound_model()
    quantized = xla.quantize_model(model, float_caches(), inputs(1)[0])
    assert len(xla.model_plan(quantized).caches) == 4
    for x in inputs(STEPS):
        assert_near(quantized(x), model(x))
    held = quantized.variables["cache"]["Block_1"]["attention"]
    assert held["cached_value"].qvalue.dtype == jnp.int8
    assert held["cache_index"] == STEPS
    whole = model.variables["cache"]["Block_1"]["attention"]["cached_value"]
    assert_near(held["cached_value"].restore(), whole)


def test_linen_variables_taken_out():
    """They pass through a jitted function, with weights in int8 beside an int8 cache."""
    model, (x,) = bound_model(), inputs(1)
    weights = xla.QuantizationRule(weight_qtype="int8", weights_only=True)
    outs = []
    for rules in ([xla.CacheRule("cache"), weights], [weights]):
        module, stored = xla.quantize_model(model, xla.PtqProvider(rules), x).unbind()
        step = jax.jit(functools.partial(module.apply, mutable=["cache"]))
        for one in inputs(3):
            found, state = step(stored, one)
            stored = {**stored, **state}
        outs.append(found)
        kept = stored["cache"]["Block_0"]["attention"]["cached_key"]
        assert isinstance(kept, xla.CacheArray) == (len(rules) == 2)
        assert not isinstance(stored["params"]["Block_0"]["Dense_0"]["kernel"], jax.Array)
    assert_near(*outs)


def attention_model():
    attention = nnx.MultiHeadAttention(
        HEADS, SIZE, SIZE, decode=True, rngs=nnx.Rngs(0), keep_rngs=False
    )
    attention.init_cache((BATCH, LENGTH, SIZE))
    return attention


def test_nnx_model():
    """The Variables of a model hold quantized caches, also under ``nnx.jit``."""
    model = attention_model()
    eager, jitted = (xla.quantize_model(model, float_caches(), inputs(1)[0]) for _ in range(2))
    assert len(xla.model_plan(eager).caches) == 2
    run = nnx.jit(lambda model, x: model(x))
    for x in inputs(STEPS):
        expected = model(x)
        found = run(jitted, x)
        assert_near(found, expected)
        np.testing.assert_allclose(eager(x), found, atol=1e-5)
    for one in (eager, jitted):
        assert one.cached_key.get_raw_value().qvalue.dtype == jnp.int8
        whole = model.cached_key.get_raw_value()
        assert_near(one.cached_key.get_raw_value().restore(), whole)
        assert one.cache_index.get_raw_value() == STEPS


def attend(row, x, cache, position):
    cache = jax.lax.dynamic_update_slice_in_dim(cache, row, position, axis=1)
    return jnp.einsum("bqd,bsd->bqs", x, cache), cache


class Reader(nnx.Module):
    """Attends with a cache that its caller holds, an argument of this name."""

    def __init__(self):
        self.project = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))

    def __call__(self, x, cache, position):
        return attend(self.project(x), x, cache, position)


class LinenReader(nn.Module):
    @nn.compact
    def __call__(self, x, cache, position):
        return attend(nn.Dense(SIZE)(x), x, cache, position)


class EquinoxReader(eqx.Module):
    kernel: jax.Array

    def __call__(self, x, cache, position):
        return attend(x @ self.kernel, x, cache, position)


def readers():
    given = jnp.ones((BATCH, 1, SIZE)), jnp.zeros((BATCH, LENGTH, SIZE)), 0
    linen = LinenReader()
    kernel = normal(SIZE, SIZE, seed=1)
    return Reader(), linen.bind(linen.init(jax.random.key(0), *given)), EquinoxReader(kernel)


@pytest.mark.parametrize("which", range(3), ids=["nnx", "linen", "equinox"])
def test_cache_that_is_an_input(which):
    model = readers()[which]
    cache = jnp.zeros((BATCH, LENGTH, SIZE))
    given = (inputs(1)[0], cache, 0)
    for rule in (xla.CacheRule("cache"), xla.CacheRule(2)):
        quantized = xla.quantize_model(model, float_caches(rule), *given)
        held, floats = xla.model_plan(quantized).quantize_cache(cache), cache
        for i, x in enumerate(inputs(3)):
            found, held = quantized(x, held, i)
            floats = rounded(model(x, floats, i)[1])
            expected = np.einsum("bqd,bsd->bqs", x, floats)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert isinstance(held, xla.CacheArray)
        found, floats = quantized(x, cache, 0)  # a float cache stays float
        assert isinstance(floats, jax.Array)
        np.testing.assert_allclose(found, model(x, cache, 0)[0], rtol=1e-5)


def test_rules_that_no_model_can_follow():
    model = Model()
    with pytest.raises(xla.QuantizationError, match=r"must hold its variables for a CacheRule"):
        xla.quantize_model(model, float_caches())
    with pytest.raises(xla.QuantizationError, match=r"must name an argument.*CacheRule\('cache'\)"):
        xla.quantize_model(attention_model(), float_caches(xla.CacheRule(0)), inputs(1)[0])
    with pytest.raises(xla.QuantizationError, match=r"no array matches CacheRule"):
        xla.quantize_model(
            Reader(), float_caches(xla.CacheRule("kv")), inputs(1)[0], inputs(1)[0], 0
        )
