"""Adapters of parameters that go into functions with custom derivative rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.numbers import normal
from jaxtap_testkit.xla_samples import dense
from provider_xla import LoraRule, PtqProvider

W = normal(16, 8) / 4
STACK = normal(3, 16, 8, seed=1) / 4
X = normal(4, 16, seed=2)


@jax.custom_vjp
def head(x, w):
    return x @ w


head.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def expert(w, x):
    """Return the result of the expert that the data choose."""
    return head(x, w[jnp.argmax(x[0, :3])])


PROGRAMS = {
    "custom_vjp": (head, W),
    "custom_jvp": (dense, W),
    "in jit": (jax.jit(head), W),
    "a transpose": (lambda x, w: head(x, w.T), W.T),
    "vmap": (lambda x, w: jax.vmap(head, (None, 0))(x, w), STACK),
    "scan": (lambda x, w: lax.scan(lambda c, w: (c, head(x, w)), 0, w)[1], STACK),
    "an expert": (lambda x, w: head(x, w[1]), STACK),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("act_qtype", [None, "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_adapters_are_those_of_merged_parameters(name, act_qtype):
    program, w = PROGRAMS[name]
    params = {"w": w}

    def fn(params, x):
        return program(x, params["w"])

    rule = LoraRule(weight_qtype="int8", act_qtype=act_qtype, rank=2)
    plan = PtqProvider(rule).plan(fn, params, X)
    assert not plan.problems
    stored, adapters = plan.quantize(params), plan.init_adapters(jax.random.key(1))
    leaves, treedef = jax.tree.flatten(adapters)
    adapters = jax.tree.unflatten(treedef, [leaf + 0.1 for leaf in leaves])

    def ours(adapters, x):
        return plan.apply(fn)(stored, x, adapters=adapters)

    def merged(adapters, x):
        return fn(plan.merge(stored, adapters), x)

    def results(fn):
        loss = lambda adapters, x: jnp.sum(jnp.sin(fn(adapters, x)))  # noqa: E731
        return fn(adapters, X), jax.grad(loss, (0, 1))(adapters, X)

    for one, other in zip(
        *map(jax.tree.leaves, (jax.jit(lambda: results(ours))(), results(merged))), strict=True
    ):
        assert np.linalg.norm(one - other) <= 0.03 * np.linalg.norm(other)


@pytest.mark.slow
def test_an_expert_that_the_data_choose_trains_or_is_a_problem():
    plan = PtqProvider(LoraRule(weight_qtype="int8", rank=2)).plan(expert, STACK, X)
    if plan.problems:
        return
    stored, adapters = plan.quantize(STACK), plan.init_adapters(jax.random.key(1))
    found = jax.grad(lambda a: jnp.sum(plan.apply(expert)(stored, X, adapters=a)))(adapters)
    merged = jax.grad(lambda a: jnp.sum(expert(plan.merge(stored, a), X)))(adapters)
    for one, other in zip(*map(jax.tree.leaves, (found, merged)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.03, atol=1e-4)
