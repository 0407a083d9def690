"""Adapters of parameters that a program takes apart or computes with."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.weight_idioms import IDIOMS, MASK, W, X, draw
from provider_xla import LoraRule, PtqProvider, QuantizationWarning

QLORA = LoraRule(weight_qtype="int8", rank=2, alpha=4.0)
# Those of whose parameters all weights are computed: they get none, and the plan says which.
COMPUTED = {
    "mask": "args[0]",
    "scale": "args[0]",
    "weight norm": "args[0]['g'] and args[0]['v']",
    "low rank": "args[0]['a'] and args[0]['b'] and args[0]['w']",
    "in a jitted function": "args[0]",
    "steps": "args[0]",
    "transposed and masked": "args[0]",
    "masked and transposed": "args[0]",
    "masked and used twice": "args[0]",
    "masked and split": "args[0]",
    "masked steps under remat": "args[0]",
    "mapped and scaled": "args[0]['g'] and args[0]['w']",
    "a jitted norm": "args[0]",
    "index, then scale": "args[0]",
    "tanh of the transpose": "args[0]",
}


def plan_of(fn, params, x=X, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        return PtqProvider(QLORA).plan(fn, params, x, **options)


def trained(plan):
    """Adapters as after some training: neither factor is zero."""
    leaves, treedef = jax.tree.flatten(plan.init_adapters(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, moved)


def check(plan, fn, params, x=X):
    """Compare with the merged parameters, quantized and float."""
    adapters, stored = trained(plan), plan.quantize(params)
    found = jax.jit(lambda a, x: plan.apply(fn)(stored, x, adapters=a))(adapters, x)
    merged = plan.merge(stored, adapters)
    np.testing.assert_allclose(found, fn(merged, x), rtol=1e-3, atol=1e-3)
    exact = plan.merge(params, adapters)
    error = np.linalg.norm(np.asarray(found) - np.asarray(fn(exact, x)))
    assert error < 0.03 * np.linalg.norm(np.asarray(found))
    plain = jax.jit(plan.apply(fn))(stored, x)
    assert np.linalg.norm(np.asarray(found - plain)) > 0.05 * np.linalg.norm(np.asarray(plain))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(IDIOMS.keys() - COMPUTED.keys()))
def test_views_and_what_is_used_as_it_is_have_adapters(name):
    fn, params = IDIOMS[name]
    params = jax.tree.map(jnp.asarray, params)
    plan = plan_of(fn, params)
    assert len(plan.adapters) == len(jax.tree.leaves(params))
    check(plan, fn, params)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_weights_are_computed_from_is_named(name):
    fn, params = IDIOMS[name]
    plan = plan_of(fn, jax.tree.map(jnp.asarray, params))
    assert not plan.adapters
    (told, *_) = [text for text in plan.problems if "no adapter" in text]
    assert told.startswith(f"{COMPUTED[name]} get")
    assert "is computed from it" in told


def test_the_parts_of_a_split_have_parts_of_one_adapter():
    def fn(p, x):
        q, k, v = jnp.split(p["qkv"], 3, axis=1)
        return jnp.concatenate([x @ q, jnp.tanh(x @ k), x @ v], axis=1)

    params = {"qkv": jnp.asarray(draw(8, 12))}
    plan = plan_of(fn, params)
    one = plan.adapters["args[0]['qkv']"]
    assert (one.shapes["a"], one.shapes["b"]) == ((8, 2), (2, 12))
    assert len(one.ops) == 3
    check(plan, fn, params)
    # The parts keep their integers: the adapter is not multiplied out.
    stored = plan.quantize(params)
    step = jax.jit(lambda a, x: plan.apply(fn)(stored, x, adapters=a))
    text = step.lower(trained(plan), X).as_text()
    assert "tensor<8x2xf32>" in text
    assert "tensor<8x12xf32>" not in text


@pytest.mark.slow
def test_parts_of_stacks_that_the_program_chooses():
    experts = jnp.asarray(draw(4, 8, 6))

    def fn(p, x):
        chosen = jnp.argmax(x[:, :4].sum(0))
        return x @ p[chosen] + x @ lax.dynamic_index_in_dim(p, 1 - chosen // 2, 0, False)

    plan = plan_of(fn, experts)
    one = plan.adapters["args[0]"]
    assert (one.shapes["a"], one.shapes["b"]) == ((4, 8, 2), (4, 2, 6))
    check(plan, fn, experts)


@pytest.mark.slow
def test_a_tied_head_that_is_transposed():
    table, tokens = jnp.asarray(draw(11, 8)), jnp.asarray([1, 4, 9])

    def fn(p, tokens):
        return jnp.tanh(p[tokens]) @ p.T

    plan = plan_of(fn, table, tokens)
    assert (plan.adapters["args[0]"].shapes["a"], plan.adapters["args[0]"].shapes["b"]) == (
        (8, 2),
        (2, 11),
    )
    check(plan, fn, table, tokens)


def test_what_is_computed_from_an_adapted_parameter_sees_its_adapter():
    def fn(p, x):
        return x @ p["w"] + x @ (p["w"] * p["g"] * MASK)

    params = {"w": jnp.asarray(W), "g": jnp.asarray(draw(6, seed=3))}
    plan = plan_of(fn, params)
    assert list(plan.adapters) == ["args[0]['w']"]
    assert any("args[0]['g'] gets no adapter" in text for text in plan.problems)
    # Without an adapter nothing of g would be kept: with one it is needed at each call.
    assert not plan.absorbed
    check(plan, fn, params)
