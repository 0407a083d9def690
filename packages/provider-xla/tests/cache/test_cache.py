"""CacheRule: KV caches that are carried quantized, in decoders of many kinds."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla

sys.path.insert(0, str(Path(__file__).parent))
from decoders import DECODERS, VOCAB, B, D, keep, parameters, rounded

FLOAT = xla.QuantizationRule(weight_qtype=None, act_qtype=None)
STEPS = 9


def tokens(step):
    return jnp.asarray((np.arange(B) * 7 + step * 5) % VOCAB)


def provider(*rules):
    return xla.PtqProvider([*rules, FLOAT])


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_rounded_rows(name):
    """A decoder gives what it gives with float caches whose rows were rounded."""
    params = parameters()
    step, cache = DECODERS[name](keep)
    reference, floats = DECODERS[name](rounded)
    plan = provider(xla.CacheRule("cache")).plan(step, params, tokens(0), cache, 0)
    assert [one.reason for one in plan.caches.values()] == [None] * len(jax.tree.leaves(cache))
    fn = jax.jit(plan.apply(step), donate_argnums=2)
    reference = jax.jit(reference)
    held = plan.quantize_cache(cache)
    for pos in range(STEPS):
        before = held
        found, held = fn(params, tokens(pos), held, pos)
        expected, floats = reference(params, tokens(pos), floats, pos)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    is_cache = lambda node: isinstance(node, xla.CacheArray)  # noqa: E731
    assert jax.tree.structure(held) == jax.tree.structure(plan.quantize_cache(cache))
    for one, whole in zip(jax.tree.leaves(held, is_leaf=is_cache), jax.tree.leaves(floats)):
        assert one.qvalue.dtype == jnp.int8
        np.testing.assert_allclose(one.restore(), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["carry", "unrolled"])
def test_float_cache_becomes_quantized(name):
    step, cache = DECODERS[name](keep)
    params = parameters()
    plan = provider(xla.CacheRule(2)).plan(step, params, tokens(0), cache, 0)
    out, held = jax.jit(plan.apply(step))(params, tokens(0), cache, 0)
    again, same = jax.jit(plan.apply(step))(params, tokens(0), plan.quantize_cache(cache), 0)
    np.testing.assert_array_equal(out, again)
    jax.tree.map(np.testing.assert_array_equal, held, same)
