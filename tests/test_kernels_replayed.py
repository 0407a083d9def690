"""Plans choose kernels; programs that they are applied to ask for none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_xla as xla
from provider_xla.program import record

W8A8 = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")
STATIC = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
NUMBERS = ("NHWC", "HWIO", "NHWC")


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def convolve(w, x):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS)


def groups(w, x):
    return lax.ragged_dot(x, w, jnp.asarray([4, 3, 1], jnp.int32))


CASES = {
    "matmul": (lambda w, x: jnp.tanh(x @ w), draw(0, 128, 64), draw(1, 8, 128)),
    "window": (convolve, draw(0, 3, 3, 32, 64), draw(1, 2, 8, 8, 32)),
    "pointwise as a matmul": (convolve, draw(0, 1, 1, 128, 64), draw(1, 2, 8, 8, 128)),
    "pointwise as a window": (convolve, draw(0, 1, 1, 32, 64), draw(1, 2, 8, 8, 32)),
    "groups": (groups, draw(0, 3, 128, 64), draw(1, 8, 128)),
}


@pytest.mark.parametrize("rule", [W8A8, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("case", CASES)
def test_no_kernel_is_chosen_while_a_program_is_traced(case, rule, monkeypatch):
    fn, w, x = CASES[case]
    plan = xla.PtqProvider(rule).plan(fn, w, x)
    ranges = plan.calibrate(w, [(x,)]) if rule.is_static else None
    stored = plan.quantize(w)
    (op,) = (op for op in plan.ops if op.quantized)
    if op.kernel is None:  # as without instructions for int8
        pytest.skip(f"no kernel here: {op.kernel_reason}")
    asked = []
    monkeypatch.setattr(record, "select_kernel", lambda *given, **more: asked.append(given))
    run = jax.jit(plan.apply(statistics=ranges))
    for batch in (x, jnp.concatenate([x, x]) if case != "groups" else x):
        assert op.kernel.partition(".")[2] in run.lower(stored, batch).as_text()
    assert not asked
    error = np.linalg.norm(run(stored, x) - fn(w, x)) / np.linalg.norm(fn(w, x))
    assert error < 0.05


def test_another_batch_is_read_as_the_plan_says():
    """A batch of one image has the scales that its image has among others."""
    fn, w, x = CASES["pointwise as a window"]
    plan = xla.PtqProvider(W8A8).plan(fn, w, x)
    stored = plan.quantize(w)
    run = jax.jit(plan.apply())
    np.testing.assert_array_equal(run(stored, x)[:1], run(stored, x[:1]))
