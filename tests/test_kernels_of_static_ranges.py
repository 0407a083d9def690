"""Activations with a range that was measured before keep their kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from provider_xla import PtqProvider, QuantizationRule

STATIC = {"act_qtype": "int8", "act_static_scale": True}
RULES = {
    "w8a8": QuantizationRule(weight_qtype="int8", **STATIC),
    "w8a8 in tiles": QuantizationRule(weight_qtype="int8", tile_size=32, **STATIC),
    "w4a8": QuantizationRule(weight_qtype="int4", tile_size=32, **STATIC),
    "percentile": QuantizationRule(
        weight_qtype="int8", act_calibration_method="percentile,99", **STATIC
    ),
}
D = 64


def layers(p, x):
    for w in p:
        x = jnp.tanh(x @ w)
    return x


def scanned(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(3 * x @ w), None), x, p)[0]


def transposed(p, x):
    return jnp.tanh(jnp.einsum("bk,nk->bn", x, p[0]) + 1) @ p[1].T


def experts(p, x):
    return lax.ragged_dot(x, p, jnp.array([4, 0, 9], jnp.int32))


def mapped(p, x):
    return jax.vmap(lambda x: jnp.tanh(x @ p[0]) @ p[1])(x)


PROGRAMS = (layers, scanned, transposed, experts, mapped)


def made(seed=0):
    rng = np.random.default_rng(seed)
    p, x = rng.normal(size=(3, D, D)) / 8, rng.normal(size=(13, D))
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (p, x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_they_run_in_kernels(fn, rule):
    p, x = made()
    plan = PtqProvider(rule).plan(fn, p, x)
    assert all(op.kernel for op in plan.ops), plan.in_xla
    ranges = plan.calibrate(p, [(x,), (0.8 * x,)])
    run = jax.jit(plan.apply(fn, ranges))
    text = run.lower(plan.quantize(p), x).as_text()
    assert "x_scale = 1" in text
    assert "dot_general" not in text
    # As XLA computes it, also of what the ranges cut off.
    in_xla = PtqProvider(rule).plan(fn, p, x, kernels=False)
    wanted = jax.jit(in_xla.apply(fn, ranges))
    for scale in (1, 5):
        found, exact = run(plan.quantize(p), scale * x), wanted(in_xla.quantize(p), scale * x)
        error = np.abs(found - exact).max(-1) / np.abs(exact).max()
        # A number halfway between two steps is rounded to either, by the last bit of a sum or tanh.
        assert np.sort(error)[-2] < 1e-5
        assert np.max(error) < 0.01


def test_steps_of_a_loop_have_a_range_each():
    p, x = made()
    rule = dataclasses.replace(RULES["w8a8"], act_batch_axes=())
    plan = PtqProvider(rule).plan(scanned, p, x)
    ranges = plan.calibrate(p, [(x,)])
    ((key, found),) = ranges.items()
    upper, y, by_hand = found.upper.ravel(), x, x
    for w, most in zip(p, upper, strict=True):
        np.testing.assert_allclose(most, jnp.abs(3 * y).max(), rtol=1e-5)
        y = jnp.tanh(3 * y @ w)
        values = qn.dequantize(qn.quantize(w, "int8", channel_axes=(1,)))
        by_hand = jnp.tanh(jnp.round(3 * by_hand * 127 / most) * most / 127 @ values)
    run = jax.jit(plan.apply(scanned, ranges))
    np.testing.assert_allclose(run(plan.quantize(p), x), by_hand, rtol=0, atol=0.02)
    assert "scan" in key


def test_what_is_not_symmetric_runs_in_xla():
    p, x = made()
    rule = QuantizationRule(weight_qtype="int8", act_calibration_method="minmax", **STATIC)
    plan = PtqProvider(rule).plan(layers, p, x)
    assert all("zero point" in op.kernel_reason for op in plan.ops)
    ranges = plan.calibrate(p, [(x,)])
    text = jax.jit(plan.apply(layers, ranges)).lower(plan.quantize(p), x).as_text()
    assert "gemm" not in text


def test_a_range_that_no_batch_reached_is_dynamic():
    p, x = made()

    def fn(p, x):
        return lax.cond(jnp.sum(x) > 1e6, lambda: x @ p[0], lambda: x @ p[1])

    plan = PtqProvider(RULES["w8a8"]).plan(fn, p, x)
    with pytest.warns(UserWarning, match="No batch reached"):
        ranges = plan.calibrate(p, [(x,)])
    with pytest.warns(UserWarning, match="No calibration batch reached"):
        text = jax.jit(plan.apply(fn, ranges)).lower(plan.quantize(p), x).as_text()
    assert text.count("te_ffi_kernels.gemm_w8a8") == 2
    assert text.count("x_scale = 1") == 1


def test_gradients_are_those_of_floats():
    p, x = made()
    plan = PtqProvider(RULES["w8a8"]).plan(layers, p, x)
    apply = plan.apply(layers, plan.calibrate(p, [(x,)]))
    found = jax.grad(lambda x: apply(plan.quantize(p), x).sum())(x)
    wanted = jax.grad(lambda x: layers(p, x).sum())(x)
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)
