"""Allocation of parts of parameters and of computed weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.weight_idioms import IDIOMS, MASK, X, draw
from provider_xla import PtqProvider, QuantizationRule

RULE = QuantizationRule(weight_qtype="int8")


def allocated(fn, params, bits, **options):
    plan = PtqProvider(RULE).plan(fn, params, X, kernels=False)
    return plan.allocate(params, X, budget_bits=bits, **options)


def measured(plan, fn, params):
    """Return the stored program's squared error over the squared norm."""
    run = jax.jit(lambda stored, params: (plan.apply(fn)(stored, X), fn(params, X)))
    found, expected = (np.asarray(y, np.float64) for y in run(plan.quantize(params), params))
    return ((found - expected) ** 2).sum() / (expected**2).sum()


def check(plan, fn, params):
    """Within its budget, and with the error that it says."""
    allocation = plan.allocation
    assert {row.path for row in allocation.weights} == set(plan.weights)
    assert {row.path: row.qtype for row in allocation.weights} == {
        path: weight.qtype for path, weight in plan.weights.items()
    }
    assert sum(weight.bytes_after for weight in plan.weights.values()) <= allocation.budget
    np.testing.assert_allclose(allocation.measured, measured(plan, fn, params), rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(IDIOMS)[::3])  # plans and passes have tests with all
def test_idioms(name):
    fn, params = IDIOMS[name]
    params = jax.tree.map(jnp.asarray, params)
    check(allocated(fn, params, 12, qtypes=["int4", "int8"]), fn, params)


def test_what_shares_parameters_has_one_format():
    def fn(p, x):
        return x @ p["a"] + 0.01 * (x @ (p["b"] * MASK)) + 0.01 * (x @ p["b"])

    params = {"a": jnp.asarray(draw(8, 6)), "b": jnp.asarray(draw(8, 6, seed=1))}
    plan = allocated(fn, params, 10.5, qtypes=["int4", "int8"], tile_size=None)
    a, b, masked = (plan.weights[path].qtype for path in plan.weights)
    assert (a, b, masked) == ("int8", "int4", "int4")
    assert ("args[0]['b']", "mul(args[0]['b'], constant)") in plan.allocation.errors
    assert len(plan.allocation.errors) == 2
    check(plan, fn, params)
