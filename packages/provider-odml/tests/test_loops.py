"""Loops with static ranges: a range for each step of a scan, joined ones for while_loop."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import normal

RULES = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8")]
JOINED = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8", static_range="joined")]
W, X = normal(4, 8, 8), normal(16, 8, seed=1)


def by_hand(body, c, xs, reverse=False, **options):
    """Compute what ``lax.scan`` does, in steps that are written out."""
    del options
    count = len(jax.tree.leaves(xs)[0])
    for i in range(count)[:: -1 if reverse else 1]:
        c, _ = body(c, jax.tree.map(lambda x, i=i: x[i], xs))
    return c, None


def layer(c, w):
    return jnp.tanh(c @ w), None


def stack(scan, w, x, part=lambda f: f, **options):
    return scan(part(layer), 10 * x, w, **options)[0]


def nested(scan, w, x):
    """Two groups of layers, the second with other values."""
    inner = jax.checkpoint(lambda c, w: scan(layer, 20 * c, w)[0])
    return scan(lambda c, w: (inner(c, w) / 16, None), x, w.reshape(2, 2, 8, 8))[0]


def branches(scan, w, x):
    def body(c, w_i):
        w, i = w_i
        return lax.cond(i % 2 == 0, lambda: jnp.tanh(c @ w), lambda: jnp.sin(c @ w)), None

    return scan(body, 10 * x, (w, jnp.arange(len(w))))[0]


PROGRAMS = {
    "scan": stack,
    "backwards": lambda scan, w, x: stack(scan, w, x, reverse=True),
    "unrolled by two": lambda scan, w, x: stack(scan, w, x, unroll=2),
    "remat in scan": lambda scan, w, x: stack(scan, w, x, jax.checkpoint),
    "scan in remat in scan": nested,
    "two calls of one body": lambda scan, w, x: (
        scan(layer, 10 * x, w)[0] + scan(layer, 0.1 * x, w)[0]
    ),
}


def error(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def forms(*names):
    """Return programs as one, with loops and with steps that are written out."""

    def form(scan):
        return lambda w, x: {name: PROGRAMS[name](scan, w, x) for name in names}

    def alone(scan):
        return lambda w, x: PROGRAMS[names[0]](scan, w, x)

    return map(form if len(names) > 1 else alone, (lax.scan, by_hand))


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


def while_loop(w, x):
    def step(state):
        i, c = state
        return i + 1, jnp.tanh(c @ w)

    return lax.while_loop(lambda state: state[0] < 3, step, (0, 10 * x))[1]


def test_while_loops_have_joined_ranges():
    quantized = odml.qat(while_loop, RULES)
    stats = quantized.calibrate(W[0], [(X,)])
    own = next(one for key, one in stats.items() if key.endswith("dot_general:0#0"))
    np.testing.assert_allclose(own.calibration().upper, 10 * X.max(), rtol=1e-5)


def exported(fn, w, rules=RULES):
    stats = odml.qat(fn, rules).calibrate(w, [(X,)])
    artifact = odml.export(fn, w, stats, rules, X)
    (actual,) = artifact.run(x=X).values()
    return artifact, error(actual, fn(w, X))


def test_a_scan_is_exported_with_a_range_for_each_step():
    rolled, written = forms("scan")
    artifact, ours = exported(rolled, W)
    assert ours <= 1.5 * exported(written, W)[1]
    scales = {one.place: one.scale for one in artifact.report.sites}
    assert scales["scan(layer)[0]/dot_general:0#0"] > 5 * scales["scan(layer)[1]/dot_general:0#0"]
    assert artifact.report.float_ops == 0
    assert artifact.report.warnings == ()
    for one in artifact.report.sites:
        assert one.float_sqnr > 15
    assert "to float" in str(artifact.report)


@pytest.mark.slow
def test_loops_are_exported_as_if_they_were_written_out():
    names = [name for name in PROGRAMS if name != "scan"]
    errors = []
    for fn in forms(*names):
        stats = odml.qat(fn, RULES).calibrate(W, [(X,)])
        device = odml.export(fn, W, stats, RULES, X).run(x=X)
        found = zip(sorted(names), device.values(), strict=True)
        exact = fn(W, X)
        errors.append({name: error(value, exact[name]) for name, value in found})
    ours, own = errors
    for name in names:
        assert ours[name] <= 1.5 * own[name], name


@pytest.mark.slow
def test_a_cond_in_a_scan_is_exported():
    def rolled(w, x):
        return branches(lax.scan, w, x)

    artifact, ours = exported(rolled, W)
    assert ours < 0.3
    assert artifact.report.warnings == ()


def products(w, x):
    """Branches whose results are integers of scales of their own, and read by a product."""
    y = lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w[0]), lambda: jnp.tanh(x @ w[1]) / 4)
    return lax.switch(jnp.int32(x[0, 0] > 0), [lambda y: y @ w[2], lambda y: y @ w[3]], y)


@pytest.mark.parametrize("output_qtype", ["int8", None])
def test_branches_are_exported(output_qtype):
    """Both are right, not that of the sample data alone: LiteRT's IF gets one of them wrong."""
    rules = [odml.OdmlRule(weight_qtype="int8", output_qtype=output_qtype)]
    stats = None
    if output_qtype is not None:
        stats = odml.qat(products, rules).calibrate(W, [(X,), (-X,)])
    artifact = odml.export(products, W, stats, rules, X)
    for x in (X, -X):
        (actual,) = artifact.run(x=x).values()
        assert error(actual, products(W, x)) < 0.1
    assert "IF" not in artifact.report.ops


def test_branches_that_no_data_can_take_are_left_out():
    def fn(w, x):
        y = lax.cond(True, lambda: jnp.tanh(x @ w[0]), lambda: x @ w[1])
        return lax.switch(2, [lambda y: y * 9, lambda y: y @ w[2], lambda y: y @ w[3]], y)

    artifact = odml.export(fn, W, odml.qat(fn, RULES).calibrate(W, [(X,)]), RULES, X)
    (actual,) = artifact.run(x=X).values()
    assert error(actual, np.tanh(X @ W[0]) @ W[3]) < 0.1
    assert artifact.report.ops["FULLY_CONNECTED"] == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("switch", [False, True])
def test_branches_that_calibration_did_not_take(switch):
    """The input is read in either, so that the one that was taken tells its range."""

    def fn(w, x):
        branches = [lambda: x @ w[0], lambda: x @ w[1]]
        taken = x[0, 0] > 1e9
        return lax.switch(1 - jnp.int32(taken), branches) if switch else lax.cond(taken, *branches)

    stats = odml.qat(fn, RULES).calibrate(W, [(X,)])
    text = (
        r"got none of (cond|switch)\(<lambda>\)/dot_general:\d\. .* No data took (cond|switch)\(<"
    )
    with pytest.raises(odml.ManifestError, match=text):
        odml.export(fn, W, stats, RULES, X)


@pytest.mark.slow
def test_a_while_loop_is_exported():
    """It stays a loop, whose first step is compared."""
    artifact, ours = exported(while_loop, W[0])
    assert ours < 0.5
    places = [one.place for one in artifact.report.sites]
    assert any("dot_general:0" in place for place in places)
    assert "WHILE" in artifact.report.ops


def test_a_range_that_cuts_off_is_warned_of():
    """The file agrees with fake quantization, which has the same ranges, and not with floats."""

    def fn(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    stats = odml.qat(fn, RULES).calibrate(W, [(X,)])
    key = "dot_general:1"
    bad = stats.with_state(stats.state.at[stats.row(key), :2].multiply(0.1))
    with pytest.warns(odml.OdmlWarning, match=f"- {key} .*SQNR .* dB from its range alone"):
        report = odml.export(fn, W, bad, RULES, X).report
    (text,) = report.warnings
    assert text.startswith(key)
    assert text in str(report)
    assert "Ranges to look at" in report.to_html()
    (site,) = [one for one in report.sites if one.place == key]
    assert site.lsb <= site.tolerance
    assert site.range_sqnr < 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert odml.export(fn, W, stats, RULES, X).report.warnings == ()


def test_what_the_program_clips_is_not_warned_of():
    """An output has the range of the clip after it: what lies beyond costs nothing."""

    def fn(w, x):
        return jnp.tanh(jnp.clip(x @ w[0], 0, 0.01) @ w[1])

    stats = odml.qat(fn, RULES).calibrate(W, [(X,)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = odml.export(fn, W, stats, RULES, X).report
    ranges = {one.place: one.range_sqnr for one in report.sites}
    assert ranges["dot_general:0"] is None
    assert ranges["clip:0"] > 30
