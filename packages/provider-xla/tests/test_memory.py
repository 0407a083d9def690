"""Plans and traces of quantized programs leave nothing behind."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jaxtap_testkit.memory import objects_kept
from provider_xla import PtqProvider, QtProvider, QuantizationRule

RULE = QuantizationRule(weight_qtype="int8", act_qtype="int8")
PARAMS = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
X = jnp.ones((2, 4))
TIMES = 30


def model(params, x):
    return jax.nn.softmax(jnp.tanh(x @ params["up"]) @ params["down"])


def raising(params, x):
    model(params, x)
    raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.parametrize("fn", [model, raising])
def test_nothing_is_kept_of_a_plan(fn):
    def plan():
        with contextlib.suppress(ZeroDivisionError):
            PtqProvider(RULE).plan(fn, PARAMS, X)

    assert objects_kept(plan, TIMES) <= 5


@pytest.mark.slow
def test_nothing_is_kept_of_a_trace():
    plan = PtqProvider(RULE).plan(model, PARAMS, X)
    stored = plan.quantize(PARAMS)
    assert objects_kept(lambda: jax.make_jaxpr(plan.apply(model))(stored, X), TIMES) <= 5


@pytest.mark.parametrize("inside", [False, True])
def test_nothing_is_kept_of_a_training_step(inside):
    def loss(params):
        return jnp.sum(model(params, X))

    def trace():
        apply = QtProvider(RULE).apply
        step = apply(jax.grad(loss)) if inside else jax.grad(apply(loss))
        jax.make_jaxpr(step)(PARAMS)

    assert objects_kept(trace, TIMES) <= 5
