"""Convolutions that read as int8 what another gives, beside the same program without that."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import te_ffi_kernels as te
from provider_xla import PtqProvider, QuantizationRule

pytestmark = pytest.mark.skipif(te.isa() == "generic", reason="XLA is faster there")

STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)


def conv(w, x, stride=1, groups=1, numbers=("NHWC", "HWIO", "NHWC")):
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def array(*shape):
    rng = np.random.default_rng([*shape])
    return jnp.asarray(rng.normal(size=shape) * 0.2, jnp.float32)


PARAMS = {
    "stem": array(3, 3, 16, 32),
    "depthwise": array(3, 3, 1, 32),
    "project": array(1, 1, 32, 48),
    "again": array(3, 3, 48, 48),
    "head": array(1, 1, 48, 20),
    "bias": array(32),
}
X = array(2, 10, 10, 16)


def network(p, x):
    """Each of five convolutions but the fourth, whose input is added to its output."""
    y = jax.nn.relu6(conv(p["stem"], x) + p["bias"])
    y = jax.nn.relu(conv(p["depthwise"], y, 2, 32) + p["bias"])
    y = conv(p["project"], y)
    y = jnp.clip(conv(p["again"], y) + y, -1, 1)
    return conv(p["head"], y).mean((1, 2))


def planned(fn, rule=STATIC, x=X):
    """Return a plan, stored parameters and statistics."""
    plan = PtqProvider(rule).plan(fn, PARAMS, x)
    statistics = plan.calibrate(PARAMS, [(x,)]) if rule.act_static_scale else None
    return plan, plan.quantize(PARAMS), statistics


def alone(plan):
    """Return a plan without chains."""
    ops = (dataclasses.replace(op, chained_to=None) for op in plan.ops)
    return dataclasses.replace(plan, ops=type(plan.ops)(ops))


def int8_results(run, *args):
    text = jax.jit(run).lower(*args).compile().as_text()
    assert text is not None
    calls = [line for line in text.splitlines() if "te_ffi_kernels.conv" in line]
    return len(calls), sum(bool(re.search(r"= s8\[", line)) for line in calls)


def chained(plan):
    return [op.chained_to for op in plan.ops]


def test_values_stay_int8_between_convolutions():
    plan, stored, statistics = planned(network)
    first, second, _, fourth, _ = (op.op_id for op in plan.ops)
    assert chained(plan) == [None, first, second, None, fourth]
    assert "int8 given x int8" in str(plan)
    assert [one["chained_to"] for one in plan.ops.as_json()] == chained(plan)
    run, floats = plan.apply(network, statistics), alone(plan).apply(network, statistics)
    # What is called twice while it is traced is called once when it runs.
    assert int8_results(run, stored, X) == (5, 3)
    assert int8_results(floats, stored, X) == (5, 0)
    np.testing.assert_array_equal(jax.jit(run)(stored, X), jax.jit(floats)(stored, X))
    several = jnp.stack([X, -X])
    of_all = jax.jit(jax.vmap(run, (None, 0)))(stored, several)
    np.testing.assert_array_equal(of_all, jax.jit(jax.vmap(floats, (None, 0)))(stored, several))


def test_derivatives_are_those_of_floats():
    plan, stored, statistics = planned(network)

    def gradient(plan):
        run = plan.apply(network, statistics)
        return jax.jit(jax.grad(lambda x: (run(stored, x) ** 2).sum()))(X)

    found = gradient(plan)
    assert np.abs(found).max() > 0.1
    np.testing.assert_array_equal(found, gradient(alone(plan)))


def test_other_programs_quantize():
    """With ranges that are measured, or that are arguments; and where floats are needed."""
    dynamic = dataclasses.replace(STATIC, act_static_scale=False)
    plan, _, _ = planned(network, dynamic)
    assert not any(chained(plan))

    plan, stored, statistics = planned(network)

    def given(stored, x, statistics):
        return plan.apply(network, statistics)(stored, x)

    assert int8_results(given, stored, X, statistics)[1] == 0
    expected = plan.apply(network, statistics)(stored, X)
    found = jax.jit(given)(stored, X, statistics)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    def shown(p, x):  # the second is used by two, the third is returned
        y = conv(p["stem"], x)
        y, other = conv(p["depthwise"], y, 1, 32), conv(p["depthwise"], y, 2, 32)
        z = conv(p["project"], y)
        return y.sum() + other.sum(), z, conv(p["again"], z)

    plan, _, _ = planned(shown)
    assert not any(chained(plan))


def test_images_with_channels_first():
    numbers = ("NCHW", "HWIO", "NCHW")

    def fn(p, x):
        return conv(p["project"], conv(p["stem"], x, numbers=numbers), numbers=numbers)

    x = X.transpose(0, 3, 1, 2)
    plan, stored, statistics = planned(fn, x=x)
    assert chained(plan) == [None, plan.ops[0].op_id]
    found = jax.jit(plan.apply(fn, statistics))(stored, x)
    np.testing.assert_array_equal(found, jax.jit(alone(plan).apply(fn, statistics))(stored, x))
