"""Static ranges in functions that JAX stages in other ways with its flags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_xla as xla
from jaxtap_testkit.conformance import SETTINGS
from jaxtap_testkit.xla_samples import draw

STATIC = xla.QuantizationRule(
    weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_batch_axes=()
)
W, X = draw((8, 8))[0], draw((16, 8), seed=1)[0]


def functions():
    by_vjp = jax.custom_vjp(lambda x, w: x @ w)
    by_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, ct: (ct @ res[1].T, res[0].T @ ct))
    by_jvp = jax.custom_jvp(lambda x, w: x @ w)
    by_jvp.defjvp(lambda p, t: (by_jvp(*p), t[0] @ p[1] + p[0] @ t[1]))
    return {
        "checkpoint": jax.checkpoint(lambda x, w: x @ w),
        "vjp": by_vjp,
        "jvp in checkpoint": jax.checkpoint(lambda x, w: by_jvp(x, w)),
        "vjp in checkpoint": jax.checkpoint(lambda x, w: by_vjp(x, w)),
    }


def loop(fn):
    """Return two layers in a loop, and one after it."""

    def program(w, x):
        x, _ = lax.scan(lambda c, _: (jnp.tanh(fn(c, w)), None), 10 * x, length=2)
        return fn(x, w)

    return program


def by_hand(w, x):
    return jnp.tanh(jnp.tanh(10 * x @ w) @ w) @ w


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", functions())
@pytest.mark.parametrize("names", SETTINGS, ids=" ".join)
def test_static_ranges_with_flags(name, names):
    before = {flag: getattr(jax.config, flag) for flag in names}
    for flag in names:
        jax.config.update(flag, True)
    try:
        program = loop(functions()[name])
        plan = xla.PtqProvider([STATIC], strict=True).plan(program, W, X)
        ranges = plan.calibrate(W, [(X,)])
        found = jax.jit(plan.apply(program, ranges))(plan.quantize(W), X)
        provider = xla.QtProvider([STATIC], strict=True)
        statistics = provider.init_statistics(program, W, X)
        apply = provider.apply(program, statistics)
        slope = jax.jit(jax.grad(lambda w: (apply(w, X) ** 2).sum()))(W)
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)
    measured = max(np.asarray(one.upper).max() for one in ranges.values())
    np.testing.assert_allclose(measured, np.abs(10 * X).max(), rtol=1e-5)
    expected = by_hand(W, X)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    expected = jax.grad(lambda w: (by_hand(w, X) ** 2).sum())(W)
    assert np.linalg.norm(slope - expected) < 0.2 * np.linalg.norm(expected)
