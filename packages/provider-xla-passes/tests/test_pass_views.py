"""Passes on parts of parameters and on computed weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.weight_idioms import IDIOMS, MASK, W, X, draw
from provider_xla import (
    Awq,
    Gptq,
    Hadamard,
    PtqProvider,
    QuantizationRule,
    SmoothQuant,
    TransformedWeight,
)

RULE = QuantizationRule(weight_qtype="int4", act_qtype="int8")
# Those that passes leave to rounding, and why.
LEFT = {
    "concatenate": "joined",
    "stack and vmap": "joined",
    "flip": "another order",
    "pad": "cut, merged or split",
    "tile": "cut, merged or split",
    "routed": "take:0 uses it too",
    "steps": "computed in a loop",
    "masked and used twice": "different axes",
    "masked steps under remat": "computed in a loop",
    "mapped and scaled": "cut, merged or split",
    "flipped kernel": "not a plain matmul",
}


def relative(actual, expected):
    return np.linalg.norm(np.asarray(actual) - expected) / np.linalg.norm(expected)


def errors_of(fn, params, passes, x=X):
    """Return the report, and errors after passes and after rounding."""
    params = jax.tree.map(jnp.asarray, params)
    plan = PtqProvider(RULE).plan(fn, params, x, kernels=False)
    stored, report = plan.optimize(params, [(x,)], passes)
    run = plan.apply(fn)
    found = jax.jit(lambda *given: [fn(given[0], x), *(run(one, x) for one in given[1:])])
    expected, after, rounded = map(np.asarray, found(params, stored, plan.quantize(params)))
    return stored, report, relative(after, expected), relative(rounded, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", IDIOMS)
def test_every_idiom(name):
    fn, params = IDIOMS[name]
    _, report, after, rounded = errors_of(fn, params, [SmoothQuant(), Gptq()])
    if name in LEFT:
        assert all(LEFT[name] in row.reasons[""] for row in report)
        assert after == rounded
    else:
        assert all(not row.reasons and row.rounded is not None for row in report)
        # Four rows of eight channels: what is measured is what it is rounded for.
        assert after < 0.8 * rounded


@pytest.mark.slow
@pytest.mark.parametrize("step", [SmoothQuant(), Awq(), Hadamard()], ids=lambda p: p.name)
def test_the_parts_of_a_transformed_parameter(step):
    """Each part gives what the whole gives."""

    def split(p, x):
        return jnp.concatenate([x @ part for part in jnp.split(p, 2, axis=1)], axis=1)

    x = draw(16, 8, seed=3) * np.array([20, 1, 1, 1, 5, 1, 1, 1], np.float32)
    stored, report, after, _ = errors_of(split, W, [step], x)
    whole, _, expected, _ = errors_of(lambda p, x: x @ p, W, [step], x)
    assert isinstance(stored, TransformedWeight)
    assert not report[0].reasons
    for one, other in zip(jax.tree.leaves(stored), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert abs(after - expected) < 0.1 * expected


@pytest.mark.slow
def test_a_computed_weight_is_transformed_as_it_is_computed():
    x = draw(16, 8, seed=3) * np.array([20, 1, 1, 1, 5, 1, 1, 1], np.float32)
    stored, report, after, rounded = errors_of(lambda p, x: x @ (p * MASK), W, [SmoothQuant()], x)
    (held,) = stored.derived.values()
    assert isinstance(held, TransformedWeight)
    assert relative(held.restore(), W * MASK) < 0.2
    assert not report[0].reasons
    assert after < rounded


def test_static_ranges_of_a_computed_weight():
    """They are those of a parameter with the same values."""
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)

    def result(fn, w):
        plan = PtqProvider(rule).plan(fn, w, X, kernels=False)
        stored, _ = plan.optimize(w, [(X,)], [SmoothQuant()])
        statistics = plan.calibrate(stored, [(X,)])
        assert list(statistics) == ["matmul:0#lhs (transformed)"]
        return jax.jit(plan.apply(fn, statistics))(stored, X)

    w = jnp.asarray(W)
    computed = result(lambda p, x: x @ (p * MASK), w)
    np.testing.assert_allclose(computed, result(lambda p, x: x @ p, w * MASK), rtol=1e-5, atol=1e-5)
