"""Training and derivatives with parameters that passes have transformed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit.xla_samples import draw
from provider_xla import Hadamard, QtProvider, QtRule


def call(fn):
    return fn


def test_statistics_of_gradients_are_found_where_operands_are_transformed():
    params, x = {"w": draw((16, 8))[0]}, draw((4, 16))[0]
    f8 = "float8_e4m3fn"
    rule = QtRule(
        weight_qtype=f8,
        act_qtype=f8,
        bwd_qtype="float8_e5m2",
        act_static_scale=True,
        bwd_static_scale=True,
        static_average=qn.AmaxHistory(4),
    )
    provider = QtProvider([rule])

    def fn(p, x):
        return x @ p["w"]

    plan = provider.plan(fn, params, x)
    stored, _ = plan.optimize(params, [(x,)], [Hadamard()])
    statistics = plan.empty_statistics(stored)
    assert set(statistics) == {"matmul:0#lhs (transformed)", "matmul:0#gradient"}
    run = provider.apply(fn, statistics)
    found = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(run(stored, x)))))(x)
    wanted = jax.grad(lambda x: jnp.sum(jnp.sin(fn(params, x))))(x)
    assert np.linalg.norm(found - wanted) < 0.15 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "jit",
    [pytest.param(jax.jit, marks=pytest.mark.slow, id="jitted"), pytest.param(call, id="not")],
)
def test_a_derivative_that_the_program_takes(jit):
    """It is the float program's, at the values that are stored."""
    w, x = draw((16, 8), (4, 16))

    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).sum()

    def fn(w, x):
        return jit(lambda w: jax.vjp(loss, w, x)[1](1.0))(w)[0]

    # Rounded again, what was rotated would be another weight, and int4 shows that.
    rule = xla.QuantizationRule(weight_qtype="int4")
    plan = xla.PtqProvider(rule).plan(fn, w, x)
    stored = plan.optimize(w, [(x,)], [xla.SmoothQuant(), xla.Hadamard()])[0]
    wanted = fn(stored.unpacked().restore(), x)
    np.testing.assert_allclose(jax.jit(plan.apply(fn))(stored, x), wanted, rtol=2e-4, atol=2e-4)
