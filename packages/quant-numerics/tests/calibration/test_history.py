"""AmaxHistory: the recipe of delayed scaling, step by step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.qarray_samples import train_conv
from quant_numerics import (
    AmaxHistory,
    Backward,
    Calibration,
    HowToQuantize,
    Matmul,
    RaggedMatmul,
    Statistics,
    calibrate,
)

STEPS = np.array([0, 3, 5, 0, np.nan, 2, np.inf, 1e-37, 1e38, 0, 0, 0, 1], np.float32)


def recipe(history, steps):
    """Return the range before each step, as Transformer Engine's DelayedScaling has it.

    What is not finite counts as nothing.
    """
    past, bound, found = [], 0.0, []
    for step in steps.astype(np.float64):
        found.append(bound)
        past = [step if np.isfinite(step) else 0.0, *past][: history.length]
        amax = max(past) if history.compute == "max" else past[0]
        bound = min(amax * 2.0**history.margin, np.finfo(np.float32).max) or bound
    return np.array([*found, bound])


@pytest.mark.parametrize(
    "history",
    [AmaxHistory(), AmaxHistory(3), AmaxHistory(1), AmaxHistory(3, "most_recent", margin=2),
     AmaxHistory(2, margin=-1)],
    ids=str,
)  # fmt: skip
def test_ranges_are_those_of_the_recipe(history):
    @jax.jit
    def run(steps):
        def step(state, upper):
            return history.update(state, Calibration(None, upper)), history.get(state).upper

        state, found = jax.lax.scan(step, history.init(Calibration(None, steps[0])), steps)
        return jnp.append(found, history.get(state).upper), state.count

    found, count = run(STEPS)
    np.testing.assert_allclose(found, recipe(history, STEPS), rtol=1e-6)
    assert np.isfinite(found).all()
    assert count == min(history.length, len(STEPS))


def test_a_step_uses_what_the_steps_before_it_were():
    history, x = AmaxHistory(2), jnp.array([4.0])
    during, update = jax.jit(history.during), jax.jit(history.update)
    state = history.init(Calibration(None, x))
    for first, step, expected in ((448.0, 4.0, 448.0), (1.0, 2.0, 4.0), (1.0, 9.0, 4.0)):
        seen = Calibration(None, jnp.array([step]))
        assert during(state, seen, first).upper == expected
        state = update(state, seen)
    assert history.get(state).upper == 9


def test_a_step_of_several_records_and_one_of_none():
    history = AmaxHistory(2)
    begin, record = jax.jit(history.begin), jax.jit(history.record)
    state = begin(history.init(Calibration(None, jnp.zeros(2))))
    for upper in ([1.0, 3.0], [2.0, -np.inf], [np.nan, 1.0]):
        state = record(state, Calibration(None, np.float32(upper)))
    np.testing.assert_array_equal(history.get(state).upper, [2, 3])
    assert state.count == 1
    for _ in range(3):  # steps that record nothing, as those without a backward pass
        state = begin(state)
    state = history.update(state, Calibration(None, jnp.full(2, -jnp.inf)))
    np.testing.assert_array_equal(history.get(state).upper, [2, 3])
    assert state.count == 1


def test_statistics_remember_and_are_restored():
    one, two = (Statistics((1, 1), AmaxHistory(2)) for _ in range(2))
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    observe = jax.jit(lambda one, x: one.observe(calibrate(x, "float8_e4m3fn")))
    for factor in (4, 1, 2):
        observe(one, factor * x)
    assert one.count == 2
    np.testing.assert_array_equal(one.calibration().upper, [[2 * np.abs(x).max()]])
    two.state = jax.tree.map(np.asarray, one.state)
    jax.tree.map(np.testing.assert_array_equal, one.state, two.state)
    assert (two.shape, two.average) == ((1, 1), AmaxHistory(2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 0}, "length must be .*got 0"),
        ({"compute": "mean"}, "compute must be 'max' or 'most_recent', got 'mean'"),
        ({"margin": 0.5}, "margin must be an integer.*got 0.5"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        AmaxHistory(**fields)
    with pytest.raises(ValueError, match="must be symmetric, got one with a lower bound"):
        Statistics((1,), AmaxHistory(), symmetric=False)


# --- the range of a cotangent --------------------------------------------------------------------

E4M3, E5M2 = HowToQuantize("float8_e4m3fn"), Backward("float8_e5m2")
RNG = np.random.default_rng(1)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# With columns of the weight whose scales are far apart, which the cotangent takes.
APART = np.array([1e-3, 1, 30, 1e3], np.float32)
OPS = {
    "dot": (
        Matmul((((1,), (0,)), ((), ()))).train,
        lambda x, w: x @ w,
        (draw(8, 16), draw(16, 4) * APART),
    ),
    "conv": (
        functools.partial(
            train_conv,
            window_strides=(1,),
            padding="VALID",
            dimension_numbers=("NWC", "WIO", "NWC"),
        ),
        lambda x, w: sum(x[:, i : i + 4] @ w[i] for i in range(3)),
        (draw(2, 6, 8), draw(3, 8, 4) * APART),
    ),
    "ragged": (
        lambda x, w, **options: RaggedMatmul().train(x, w, jnp.array([3, 5]), **options),
        lambda x, w: jnp.concatenate([x[:3] @ w[0], x[3:] @ w[1]]),
        (draw(8, 16), draw(2, 16, 4) * APART),
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_a_cotangent_with_a_given_range(name):
    op, exact, (x, w) = OPS[name]

    @functools.partial(jax.jit, static_argnums=2)
    def both(g, upper, channelwise=True):
        how = dataclasses.replace(E4M3, channelwise=channelwise)
        run = functools.partial(
            op,
            lhs_how=how,
            rhs_how=how,
            backward=E5M2,
            cotangent_calibration=None if upper is None else Calibration(None, upper),
        )
        return jax.vjp(run, x, w)[1](g), jax.vjp(exact, x, w)[1](g)

    g = draw(*jax.eval_shape(exact, x, w).shape)
    largest = np.abs(g).max()

    def errors(g, upper):
        pairs = zip(*both(g, upper), strict=True)
        return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]

    # A range that is wider, as after steps of larger gradients, loses nothing in float8.
    for upper in (None, largest, 8 * largest, 0):
        assert max(errors(g, None if upper is None else np.float32(upper))) < 0.15, upper
    # What lies outside saturates. (Channels of smaller scales have room left.)
    found, _ = both(g, np.float32(0.5), False)
    _, wanted = both(np.clip(g, -0.5, 0.5), None)
    for ours, exactly in zip(found, wanted, strict=True):
        assert np.linalg.norm(ours - exactly) / np.linalg.norm(exactly) < 0.15


def test_what_a_given_range_does_not_fit():
    op, _, (x, w) = OPS["dot"]
    good = Calibration(None, np.float32(1))
    for backward, calibration, message in (
        (None, good, "backward must quantize a gradient"),
        (Backward("int8", tile_size=2), good, "without tiles or blocks"),
        (Backward("mxfp8"), good, "without tiles or blocks"),
        (E5M2, Calibration(None, np.ones((1, 1), np.float32)), r"of shape \(\)"),
        (E5M2, Calibration(np.float32(-1), np.float32(1)), "must be symmetric"),
    ):
        with pytest.raises(ValueError, match=message):
            op(x, w, lhs_how=E4M3, rhs_how=E4M3, backward=backward,
               cotangent_calibration=calibration)  # fmt: skip
