"""Loops with static ranges: a range for each step of a scan, joined ones for while_loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_loops import PROGRAMS, RULES, W, X, error, forms, while_loop

JOINED = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8", static_range="joined")]


def calibrated(fn, rules=RULES):
    """Return the quantized program with ranges of calibration, and those."""
    quantized = odml.qat(fn, rules)
    stats = quantized.calibrate(W, [(X,)])
    return jax.jit(lambda w, x: quantized(w, x, quant_stats=stats, update_quant_stats=False)), stats


@pytest.mark.slow
def test_errors_are_those_of_steps_written_out():
    rolled, written = forms(*PROGRAMS)
    found, own = (calibrated(fn)[0](W, X) for fn in (rolled, written))
    for name, expected in written(W, X).items():
        most = error(own[name], expected)
        assert 0 < most < 0.2, name
        assert error(found[name], expected) <= 1.5 * most, name


def test_training_moves_the_ranges_of_each_step():
    rolled, written = forms("scan in remat in scan")
    found = []
    for fn in (rolled, written):
        quantized = odml.qat(fn, RULES)
        stats = quantized.init(W, X)

        @jax.jit
        def step(w, x, quantized=quantized, stats=stats):
            return jax.value_and_grad(lambda w: jnp.sum(quantized(w, x, quant_stats=stats) ** 2))(w)

        values = [step(W, scale * X) for scale in (1, 2, 0.5)]
        found.append((values, stats))
    (rolled_values, stats), (written_values, _) = found
    slope = jax.jit(jax.grad(lambda w, x: jnp.sum(written(w, x) ** 2)))
    slopes = [slope(W, scale * X) for scale in (1, 2, 0.5)]
    for (loss, slope), (own_loss, own), exact in zip(
        rolled_values, written_values, slopes, strict=True
    ):
        np.testing.assert_allclose(loss, own_loss, rtol=0.05)
        assert error(slope, exact) <= 1.5 * error(own, exact)
    for key, one in stats.items():
        assert int(one.count) == 3
        assert np.isfinite(one.calibration().upper).all()
        assert one.calibration().upper.shape == stats.steps(key)


@pytest.mark.slow
def test_ranges_are_those_of_each_step():
    fn = next(forms("scan"))
    _, stats = calibrated(fn)
    seen, c = [], 10 * np.asarray(X, np.float64)
    for w in np.asarray(W, np.float64):
        seen.append((c.min(), c.max()))
        c = np.tanh(c @ w)
    own = stats["scan(layer)/dot_general:0#0"].calibration()
    np.testing.assert_allclose(jnp.stack([own.lower, own.upper], 1), seen, rtol=1e-5)


@pytest.mark.parametrize("first", ["loop", "outside"])
def test_a_range_that_a_call_has_seen_is_read_in_loops_and_outside(first):
    """The input is observed by what reads it first; what reads it later rounds to that range."""
    is_first = first == "loop"
    # Products alone: the sums of a loop and those written out are not fused alike.
    rule = odml.OdmlRule(op_names=("dot_general",), weight_qtype="int8", output_qtype="int8")

    def fn(loop, w, x):
        outside = 0 if is_first else x @ w[1]
        total = loop(lambda c, _: (c + x @ w[0], None), jnp.zeros_like(x), length=2)[0]
        return total + (x @ w[1] if is_first else outside)

    def steps(body, c, *, length):
        for _ in range(length):
            c, _ = body(c, None)
        return c, None

    def trained(loop):
        quantized = odml.qat(lambda w, x: fn(loop, w, x), rule)
        stats = quantized.init(W, X)

        @jax.jit
        def step(w, state, x):
            def loss(w):
                out, new = quantized.with_state(stats, state, w, x)
                return jnp.sum(out**2), new

            return jax.value_and_grad(loss, has_aux=True)(w)

        (value, state), slope = step(W, stats.state, X)
        (_, state), _ = step(W, state, 3 * X)
        return value, slope, stats.with_state(state)

    (value, slope, stats), (own, own_slope, _) = trained(lax.scan), trained(steps)
    np.testing.assert_allclose(value, own, rtol=1e-5)
    np.testing.assert_allclose(slope, own_slope, rtol=1e-4, atol=1e-4 * float(jnp.abs(slope).max()))
    rows = np.asarray(X, np.float64).reshape(len(X), -1)
    found = stats["args[1]"]
    assert int(found.count) == 2
    # The mean over the batch, and over the two steps.
    np.testing.assert_allclose(
        found.calibration().upper, 2 * np.maximum(rows.max(1), 0).mean(), rtol=1e-5
    )


def test_joined_ranges_are_those_of_the_largest_step():
    """Of each call, and then their mean: not the mean over steps, which cuts off."""
    fn = next(forms("scan"))
    quantized = odml.qat(fn, JOINED)
    stats = quantized.calibrate(W, [(X,), (2 * X,)])
    own = stats["scan(layer)/dot_general:0#0"]
    assert (int(own.count), own.calibration().upper.shape) == (2, ())
    np.testing.assert_allclose(own.calibration().upper, 15 * X.max(), rtol=1e-5)
    np.testing.assert_allclose(own.calibration().lower, 15 * X.min(), rtol=1e-5)


def test_loops_of_many_steps_are_joined():
    def fn(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=129)[0]

    def steps(rules):
        return {one.steps for one in odml.qat(fn, rules).plan(W[0], X).sites.values()}

    assert steps(RULES) == {()}
    each = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8", static_range="step")]
    assert (129,) in steps(each)
    with pytest.raises(ValueError, match="static_range must be None where outputs have no static"):
        odml.OdmlRule(weight_qtype="int8", static_range="step")
    with pytest.raises(ValueError, match="static_range must be None, 'step' or 'joined'"):
        odml.OdmlRule(weight_qtype="int8", output_qtype="int8", static_range="mean")


def test_statistics_of_steps_are_saved_and_loaded(tmp_path):
    apply, stats = calibrated(next(forms("scan")))
    stats.save(tmp_path / "stats.json")
    loaded = odml.QuantStats.load(tmp_path / "stats.json")
    np.testing.assert_array_equal(loaded.state, stats.state)
    assert [loaded.steps(key) for key in loaded] == [stats.steps(key) for key in stats]
    again = odml.qat(next(forms("scan")), RULES)
    np.testing.assert_array_equal(
        again(W, X, quant_stats=loaded, update_quant_stats=False), apply(W, X)
    )
    text = stats.to_json().replace('"steps": [\n    4\n   ]', '"steps": [\n    3\n   ]')
    assert text != stats.to_json()
    with pytest.raises(odml.ManifestError, match="one for each of"):
        odml.QuantStats.from_json(text)


def test_a_loop_of_another_length_has_the_joined_range():
    _, stats = calibrated(next(forms("scan")))
    one = stats["scan(layer)/dot_general:0#0"]
    whole = one.calibration()
    for index, step in (((1,), 1), ((4,), 0), ((), 0)):
        found = one.at(index).calibration()
        np.testing.assert_allclose(found.upper, whole.upper[step], rtol=1e-6)
    assert whole.upper[0] == whole.upper.max()


def test_while_loops_have_joined_ranges():
    quantized = odml.qat(while_loop, RULES)
    stats = quantized.calibrate(W[0], [(X,)])
    own = next(one for key, one in stats.items() if key.endswith("dot_general:0#0"))
    np.testing.assert_allclose(own.calibration().upper, 10 * X.max(), rtol=1e-5)
