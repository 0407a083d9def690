"""Moving averages of calibrations against NumPy, and in place under transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from quant_numerics import Calibration, MovingAverage, Statistics, calibrate

pytestmark = pytest.mark.sample(2)

STEPS = np.random.default_rng(0).uniform(1, 2, size=(5, 3, 1)).astype(np.float32)


def averaged(average, steps, symmetric=True):
    def calibration(step):
        return Calibration(None if symmetric else -2 * step, step)

    @jax.jit
    def run(steps):
        state = average.init(calibration(steps[0]))
        state = lax.scan(lambda s, x: (average.update(s, calibration(x)), None), state, steps)[0]
        return average.get(state), state

    return run(steps)


def test_the_mean_of_all():
    found, state = averaged(MovingAverage(), STEPS)
    np.testing.assert_allclose(found.upper, STEPS.astype(np.float64).mean(0), rtol=1e-6)
    assert found.lower is None
    assert state.count == 5
    assert state.count.dtype == jnp.int32
    found, _ = averaged(MovingAverage(), STEPS, symmetric=False)
    np.testing.assert_allclose(found.lower, -2 * STEPS.mean(0), rtol=1e-6)


def test_the_exponential_average_is_a_weighted_mean():
    found, _ = averaged(MovingAverage(0.9), STEPS)
    weights = 0.9 ** np.arange(4, -1, -1)
    want = np.tensordot(weights / weights.sum(), STEPS.astype(np.float64), 1)
    np.testing.assert_allclose(found.upper, want, rtol=1e-5)
    found, _ = averaged(MovingAverage(0.9), STEPS[:1])
    np.testing.assert_allclose(found.upper, STEPS[0], rtol=1e-5)


def test_nothing_yet():
    average = MovingAverage()
    state = average.init(Calibration(None, jnp.ones((3, 1))))
    np.testing.assert_array_equal(average.get(state).upper, np.zeros((3, 1)))
    default = Calibration(None, jnp.full((3, 1), 7.0))
    np.testing.assert_array_equal(average.get(state, default).upper, default.upper)
    state = average.update(state, Calibration(None, jnp.ones((3, 1))))
    np.testing.assert_array_equal(average.get(state, default).upper, np.ones((3, 1)))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_left_out(bad):
    steps = STEPS.copy()
    steps[2, 1] = bad
    found, state = averaged(MovingAverage(), steps)
    np.testing.assert_allclose(found.upper, np.delete(STEPS, 2, 0).mean(0), rtol=1e-6)
    assert state.count == 4


def test_decay_is_checked():
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1.0"):
        MovingAverage(1.0)
    assert MovingAverage(0.5) == MovingAverage(0.5)


def observed(run):
    """The average after `run(statistics, x)` for some data."""
    statistics = Statistics((3, 1))
    run(statistics)
    return statistics


def scale(statistics, x):
    statistics.observe(calibrate(x, "int8", channel_axes=(0,)))
    return x * statistics.calibration().upper


X = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
UPPER = np.abs(X).max(1, keepdims=True)

RUNS = {
    "plain": lambda s: scale(s, X),
    "jit, closed over": lambda s: jax.jit(functools.partial(scale, s))(X),
    "jit, argument": lambda s: jax.jit(scale)(s, X),
    "remat": lambda s: jax.jit(jax.checkpoint(functools.partial(scale, s)))(X),
    "grad": lambda s: jax.grad(lambda x: scale(s, x).sum())(X),
    "jit of grad": lambda s: jax.jit(jax.grad(lambda x: scale(s, x).sum()))(X),
    "grad of jit": lambda s: jax.grad(jax.jit(lambda x: scale(s, x).sum()))(X),
    "scan": lambda s: jax.jit(lambda x: lax.scan(lambda c, _: (c, scale(s, c)), x, length=1))(X),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_observed_inside_is_seen_outside(name):
    statistics = observed(RUNS[name])
    assert statistics.count == 1
    np.testing.assert_array_equal(statistics.calibration().upper, UPPER)


def test_no_gradient_goes_through_the_average():
    def loss(x):
        statistics = Statistics((3, 1))
        return scale(statistics, x).sum()

    grad = jax.jit(jax.grad(loss))(X)
    np.testing.assert_allclose(grad, np.broadcast_to(UPPER, X.shape), rtol=1e-6)


@pytest.mark.slow
def test_scans_accumulate():
    statistics = Statistics((3, 1), MovingAverage(0.5))
    jax.jit(lambda xs: lax.scan(lambda c, x: (c, scale(statistics, x)), 0, xs))(
        jnp.stack([X, 2 * X, 4 * X])
    )
    assert statistics.count == 3
    weights = np.array([1, 2, 4]) / 7
    np.testing.assert_allclose(
        statistics.calibration().upper, UPPER * (weights @ [1, 2, 4]), rtol=1e-6
    )


def test_state_is_saved_and_restored():
    first, second = Statistics((3, 1)), Statistics((3, 1))
    scale(first, X)
    second.state = jax.tree.map(np.asarray, first.state)
    np.testing.assert_array_equal(second.calibration().upper, UPPER)
    assert jax.tree.map(lambda x: x, first).count == 1


def test_what_is_refused():
    statistics = Statistics((3, 1))
    with pytest.raises(ValueError, match=r"bounds of shape \(3, 1\), .* got shape \(1, 1\)"):
        statistics.observe(calibrate(X, "int8"))
    with pytest.raises(
        ValueError, match=r"without a lower bound .* Make them with symmetric=False"
    ):
        statistics.observe(calibrate(X, "int8", channel_axes=(0,), method="minmax"))
    with pytest.raises(ValueError, match="must be with a lower bound"):
        Statistics((1, 1), symmetric=False).observe(calibrate(X, "int8"))


@pytest.mark.slow
@pytest.mark.parametrize("part", [lambda body: body, jax.checkpoint], ids=["plain", "remat"])
def test_statistics_made_in_a_differentiated_function(part):
    """Each step of the scan observes once, and the averages are constants of the derivative."""

    def fn(x):
        statistics = Statistics((1,))

        def body(x, w):
            statistics.observe(Calibration(None, lax.stop_gradient(jnp.abs(x).max()[None])))
            return jnp.sin(x * w) * statistics.calibration().upper, None

        y, _ = lax.scan(part(body), x, jnp.array([1.0, 2.0, 3.0]))
        return y.sum(), statistics.state

    def by_hand(x):
        seen = []
        for w in (1.0, 2.0, 3.0):
            seen.append(lax.stop_gradient(jnp.abs(x).max()))
            x = jnp.sin(x * w) * (sum(seen) / len(seen))
        return x.sum(), sum(seen)

    x = jnp.array([0.3, 0.5])
    (expected, total), slope = jax.value_and_grad(by_hand, has_aux=True)(x)
    for loss in (fn, jax.jit(fn)):
        (value, state), found = jax.value_and_grad(loss, has_aux=True)(x)
        np.testing.assert_allclose((value, state.total.upper[0]), (expected, total), rtol=1e-5)
        np.testing.assert_allclose(found, slope, rtol=1e-5)
        assert state.count == 3
